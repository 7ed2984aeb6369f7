"The plan of page 76: its commands run, on a small sample in the format of the download."
import json
import math
import re
import shlex
from pathlib import Path

import pytest

datasets = pytest.importorskip('datasets', reason="no datasets: pip install 'annotated_transformer[large]'")

from annotated_transformer.checkpoints import read_log
from annotated_transformer.cli import main, parse
from annotated_transformer.files import read_json
from annotated_transformer.prepared import read_manifest
from annotated_transformer.recipe import RECIPES, default_run
from annotated_transformer.toy_languages import toy_ende

PAGE = Path(__file__).resolve().parents[1] / 'nbs' / '76_wmt14.ipynb'
SMALL = ('--n-layers 2 --d-model 64 --d-ff 128 --n-heads 4 --dropout 0 --max-tokens 512 --global-tokens 1024 '
         '--max-steps 300 --save-every 30 --warmup-steps 100 --peak-lr 0.004 --device cpu').split()


def commands():
    "The commands of the plan: lists of arguments by the name of the command."
    cells = json.loads(PAGE.read_text('utf-8'))['cells']
    prose = '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown')
    block = re.search(r'```sh\n(.+?)```', prose, re.S)[1]
    rows = [shlex.split(line) for line in block.splitlines()]
    return {row[1]: row[1:] for row in rows if row[0] == 'annotated-transformer'}


def write_split(folder, name, pairs):
    rows = [{'translation': {'de': pair.tgt, 'en': pair.src}} for pair in pairs]
    datasets.Dataset.from_list(rows).to_parquet(folder / f'{name}.parquet')


@pytest.fixture
def sample(tmp_path, monkeypatch):
    "A folder with WMT 2014 as Parquet files, of sentences from the toy grammar."
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'download' / 'de-en'
    folder.mkdir(parents=True)
    pairs = toy_ende('train', n=6000)
    write_split(folder, 'train-00000-of-00002', pairs[:4000])
    write_split(folder, 'train-00001-of-00002', pairs[4000:])
    write_split(folder, 'validation-00000-of-00001', toy_ende('val', n=60))
    write_split(folder, 'test-00000-of-00001', toy_ende('test', n=80))
    return tmp_path / 'download'


def test_the_plan_is_the_recipe(sample):
    "On the prepared folder, `train` uses the paper's base model, its batches and schedule."
    main([*commands()['prepare'], '--data-dir', str(sample), '--num-proc', '1'])
    train = parse(commands()['train'])
    recipe = default_run(recipe='wmt14-en-de')
    assert train.run.training == recipe.training
    assert (recipe.training.max_tokens, recipe.training.batches_per_step, recipe.training.max_steps) == (25_000, 1, 100_000)
    assert (recipe.training.warmup_steps, recipe.training.label_smoothing, recipe.training.peak_lr) == (4000, 0.1, None)
    assert (recipe.training.average_checkpoints, recipe.training.precision) == (5, 'bfloat16')
    vocab_size = train.run.model.vocab_size
    assert vars(train.run.model) == vars(recipe.model) | {'vocab_size': vocab_size}
    assert (recipe.model.n_layers, recipe.model.d_model, recipe.model.norm, recipe.model.tied) == (6, 512, 'post', True)
    plan = read_json(sample.parent / 'wmt14' / 'plan.json')
    assert plan['tokenizer']['vocab_size'] == RECIPES['wmt14-en-de']['model']['vocab_size'] == 37_000


@pytest.mark.slow
def test_every_command_of_the_plan_runs_on_a_sample(sample, capsys):
    main([*commands()['prepare'], '--data-dir', str(sample), '--num-proc', '1'])
    manifest = read_manifest('wmt14')
    assert manifest['corpus'] == 'wmt14' and manifest['pair'] == 'en-de' and manifest['pairs'] > 5000
    assert manifest['splits'] == {'val': 60, 'test': 80}
    assert len(manifest['inputs']) == 4 and all(len(record['sha256']) == 64 for record in manifest['inputs'].values())

    main([*commands()['train'], *SMALL])
    log = read_log(Path('runs/base/log.jsonl'))
    assert (log[0]['max_tokens'], log[0]['global_tokens']) == (512, 1024)
    vocab_size = read_json(Path('runs/base/config.json'))['vocab_size']
    losses = [row['loss'] for row in log if 'loss' in row]
    assert abs(losses[0] - math.log(vocab_size)) < 1 # the first check of the plan
    val_losses = [row['val_loss'] for row in log if 'val_loss' in row]
    assert len(val_losses) == 10 and val_losses[-1] < val_losses[0] - 1
    assert all('val_bleu' in row for row in log if 'val_loss' in row)
    assert log[-1]['val_loss_averaged'] < val_losses[0]
    kept = [path.name for path in Path('runs/base/checkpoints').iterdir() if path.name.startswith('step-')]
    assert len(kept) <= 6 # of which the plan counts the disk space

    capsys.readouterr()
    main([*commands()['evaluate'], '--device', 'cpu'])
    said = capsys.readouterr().out
    assert '80 sentences' in said and 'tok:13a' in said
    assert len(Path('runs/base.newstest2014.de').read_text('utf-8').splitlines()) == 80
    bleu = float(re.search(r'BLEU\D+([\d.]+)', said)[1])
    assert bleu > 2, said
