"From a corpus to a trained folder, with every way that text can take into it."
import json
from dataclasses import replace
from pathlib import Path

import pytest, torch

from annotated_transformer.v1.checkpoints import checkpoints, load_model, read_log
from annotated_transformer.v1.corpora import CorpusConfig, load_corpus
from annotated_transformer.v1.recipe import (RunConfig, claim, default_run, differences, evaluate, new_model, settings,
                                          train_translator, with_defaults)
from annotated_transformer.v1.toy_languages import toy_ende
from annotated_transformer.v1.training import TrainConfig
from annotated_transformer.v1.transformer import TransformerConfig
from annotated_transformer.v1.translator import SHIPPED, Translator
from annotated_transformer.v1.vocabulary import load_tokenizer

MODEL = TransformerConfig(300, n_layers=1, d_model=16, d_ff=32, n_heads=2, max_len=64)
TRAINING = TrainConfig(max_tokens=512, warmup=10, peak_rate=4e-3, max_steps=20, save_every=10, log_every=5)

@pytest.fixture(scope='module')
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp('table') / 'pairs.tsv'
    lines = [f'{p.src}\t{p.tgt}\n' for p in toy_ende('train', n=400)]
    path.write_text(''.join([*lines, lines[0], '\tnichts\n', 'a ' * 200 + '\tb\n']), encoding='utf-8')
    return path

@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch): monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))

def run(table, **changes):
    corpus = {name: changes.pop(name) for name in list(changes) if name in CorpusConfig.__dataclass_fields__}
    training = {name: changes.pop(name) for name in list(changes) if name in TrainConfig.__dataclass_fields__}
    return RunConfig(CorpusConfig('tsv', tsv=table, held_out=20, **corpus), MODEL,
                     replace(TRAINING, **training), **changes)

def train(config, out): return train_translator(config, out, progress_bar=False)
def weights(folder): return torch.cat([p.detach().flatten() for p in load_model(folder).parameters()])


def interrupt(config, out, monkeypatch):
    "Stop a run at its 15th step, and go on."
    from annotated_transformer.v1 import training
    step = training.Trainer.step
    def stop(self, batches):
        step(self, batches) if self.at.step < 15 else (_ for _ in ()).throw(RuntimeError('unplugged'))
    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, 'step', stop)
        with pytest.raises(RuntimeError, match='unplugged'): train(config, out)
    return train(config, out)

@pytest.mark.parametrize('changes', [dict(bpe_dropout=0.2), dict(on_disk=True), dict(tokenizer='words')], ids=str)
def test_every_way_goes_on_exactly(table, tmp_path, monkeypatch, changes):
    config = run(table, **changes)
    train(config, tmp_path / 'whole')
    interrupt(config, tmp_path / 'stopped', monkeypatch)
    assert torch.equal(weights(tmp_path / 'whole'), weights(tmp_path / 'stopped'))
    assert (tmp_path / 'whole/log.jsonl').read_bytes() == (tmp_path / 'stopped/log.jsonl').read_bytes()

def test_dropout_of_merges_changes_what_is_read_and_not_what_is_kept(table, tmp_path):
    plain, dropped = train(run(table), tmp_path / 'plain'), train(run(table, bpe_dropout=0.5), tmp_path / 'dropped')
    assert plain.tokenizer.encode('The dog sleeps.') == dropped.tokenizer.encode('The dog sleeps.')
    tokens = [read_log(tmp_path / name / 'log.jsonl') for name in ('plain', 'dropped')]
    assert tokens[0] != tokens[1]

def test_cleaning_is_counted_in_the_log(table, tmp_path):
    train(run(table, max_words=50, unique=True), tmp_path / 'run')
    first = read_log(tmp_path / 'run/log.jsonl')[0]
    assert first['step'] == 0
    counts = {name: n for name, n in first.items() if name.startswith('dropped_')}
    assert all(counts[f"dropped_{why}"] == 1 for why in ("blank", "too long", "duplicate")), counts

def test_vectors_are_where_the_run_starts_and_frozen_when_asked(table, tmp_path):
    words = sorted({w for p in toy_ende('train', n=400) for w in p.src.rstrip('.?!').lower().split()})[:40]
    torch.manual_seed(0)
    (tmp_path / 'vectors.txt').write_text(''.join(
        f'{w} {" ".join(f"{x:.4f}" for x in torch.randn(16).tolist())}\n' for w in words))
    frozen = train(run(table, tokenizer='words', vectors=tmp_path / 'vectors.txt', freeze_vectors=True),
                   tmp_path / 'frozen')
    free = train(run(table, tokenizer='words', vectors=tmp_path / 'vectors.txt'), tmp_path / 'free')
    assert 0 < read_log(tmp_path / 'frozen/log.jsonl')[0]['covered_by_vectors'] < 1
    other = next(i for i in range(10, len(frozen.tokenizer)) if frozen.tokenizer.token(i).lower() not in words)
    from annotated_transformer.v1.vocabulary import load_vectors
    ids, rows = load_vectors(tmp_path / 'vectors.txt', frozen.tokenizer, 16)
    word, start = ids[-1], torch.from_numpy(rows)[-1]
    torch.testing.assert_close(frozen.model.src_embed.weight[word].detach(), start)
    assert not torch.allclose(free.model.src_embed.weight[word].detach(), start)
    config = run(table, tokenizer='words', vectors=tmp_path / 'vectors.txt', freeze_vectors=True)
    began = new_model(config, frozen.tokenizer)[0].src_embed.weight[other]
    assert not torch.allclose(frozen.model.src_embed.weight[other], began) # what has no vector learns

def test_a_run_that_starts_from_another_has_its_weights_and_words_and_goes_on_exactly(table, tmp_path, monkeypatch):
    train(run(table), tmp_path / 'first')
    further = replace(run(table, seed=2, unique=True), start_from=tmp_path / 'first')
    model, _ = new_model(further, load_tokenizer(tmp_path / 'first/tokenizer.json'))
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), weights(tmp_path / 'first'))
    train(further, tmp_path / 'whole')
    interrupt(further, tmp_path / 'stopped', monkeypatch)
    assert torch.equal(weights(tmp_path / 'stopped'), weights(tmp_path / 'whole'))
    assert not torch.equal(weights(tmp_path / 'whole'), weights(tmp_path / 'first'))
    assert (tmp_path / 'whole/tokenizer.json').read_bytes() == (tmp_path / 'first/tokenizer.json').read_bytes()
    assert settings(further)['start_from'] == str(tmp_path / 'first')

def test_a_start_that_does_not_fit_is_told(table, tmp_path):
    train(run(table, max_steps=1), tmp_path / 'first')
    tokenizer, base = load_tokenizer(tmp_path / 'first/tokenizer.json'), run(table, start_from=tmp_path / 'first')
    for changes, said in [(dict(norm='pre'), "norm is 'post' there and 'pre' here"), (dict(n_heads=1), 'n_heads is 2')]:
        with pytest.raises(ValueError, match=said):
            new_model(replace(base, model=replace(MODEL, **changes)), tokenizer)
    new_model(replace(base, model=replace(MODEL, dropout=0.5)), tokenizer)
    with pytest.raises(ValueError, match='translates en-de, not de-en'):
        train(run(table, pair='de-en', start_from=tmp_path / 'first'), tmp_path / 'other')
    for changes in (dict(tokenizer='words'), dict(model=replace(MODEL, vocab_size=50))):
        wanted = r"first brings a vocabulary, \d+ of bpe: leave tokenizer='\w+' and vocab_size"
        with pytest.raises(ValueError, match=wanted): train(replace(base, **changes), tmp_path / 'other')
    assert default_run(start_from=tmp_path / 'first').tokenizer == 'bpe'
    with pytest.raises(ValueError, match='comes with a model to start from'): run(table, tokenizer='sentencepiece')
    with pytest.raises(ValueError, match='leave vectors out'): run(table, start_from=tmp_path, vectors=tmp_path / 'x')
    with pytest.raises(FileNotFoundError, match='is no model folder'): default_run(start_from=tmp_path / 'none')

@pytest.mark.parametrize('changes, said', [
    (dict(bpe_dropout=1.0), 'bpe_dropout=1.0 must be at least 0 and below 1'),
    (dict(bpe_dropout=0.1, on_disk=True), 'choose one'),
    (dict(bpe_dropout=0.1, tokenizer='words'), "tokenizer='words' has none"),
    (dict(bpe_dropout=0.1, max_tokens=20), 'max_tokens=20 have no room for it'),
    (dict(freeze_vectors=True), 'needs vectors'), (dict(monitor='val_bleu'), 'set val_sentences'),
    (dict(val_sentences=-1), 'val_sentences=-1 must be at least 0')], ids=str)
def test_settings_that_do_not_go_together(table, changes, said):
    with pytest.raises(ValueError, match=said): run(table, **changes)

def test_the_widths_of_a_compiled_run_have_room(table):
    "They are rounded up to multiples of 16, which a sentence cut at random must fit in."
    longer, dropped = replace(MODEL, max_len=70), dict(bpe_dropout=0.1, max_tokens=70)
    replace(run(table, **dropped), model=longer)
    with pytest.raises(ValueError, match='into 80 pieces'): replace(run(table, compile=True, **dropped), model=longer)

def test_a_setting_that_came_later_does_not_bar_the_way(table, tmp_path, monkeypatch):
    "A run that an earlier version began goes on, when what has been added since is at its default."
    config = run(table)
    claim(tmp_path/'run', config)
    held = json.loads((tmp_path/'run/run.json').read_text())
    for part, name in (('model', 'activation'), ('training', 'ema'), ('corpus', 'unique')): del held[part][name]
    del held['bpe_dropout']
    (tmp_path/'run/run.json').write_text(json.dumps(held))
    claim(tmp_path/'run', config)
    with pytest.raises(ValueError, match='bpe_dropout is 0.0 there and 0.1 here'):
        claim(tmp_path/'run', replace(config, bpe_dropout=0.1))


def test_a_finished_run_goes_on_when_its_limit_is_moved(table, tmp_path):
    "Two passes and then two more are four passes; a smaller limit afterwards ends at once where the run is."
    short, long = run(table, max_epochs=2, save_every=5), run(table, max_epochs=4, save_every=5, max_steps=1000)
    train(long, tmp_path/'straight')
    train(short, tmp_path/'run')
    stamp = (tmp_path/'run/model.safetensors').stat().st_mtime_ns
    train(short, tmp_path/'run')
    assert (tmp_path/'run/model.safetensors').stat().st_mtime_ns == stamp                   # nothing moved: loaded
    longer = train(long, tmp_path/'run')
    assert longer.training['progress']['epoch'] == 4 and longer.training['run'] == settings(long)
    last = [checkpoints(tmp_path/name)[-1] for name in ('straight', 'run')]
    assert torch.equal(*map(weights, last)) and last[0].name == last[1].name
    again = train(replace(short, training=replace(short.training, max_epochs=3)), tmp_path/'run')
    assert again.training['progress']['step'] == longer.training['progress']['step']

def test_early_stopping_on_bleu(table, tmp_path):
    config = run(table, monitor='val_bleu', patience=1, save_every=2, max_steps=100, peak_rate=1e-9, val_sentences=5)
    translator = train(config, tmp_path / 'run')
    assert translator.training['progress']['step'] == 4            # BLEU 0, and 0 again

@pytest.mark.parametrize('text', ['{}', '[]', '{"model": ', '3'])
def test_a_damaged_file_of_settings_is_named(table, tmp_path, text):
    (tmp_path / 'run.json').write_text(text)
    with pytest.raises(ValueError, match='run.json is damaged: .*--overwrite'): claim(tmp_path, run(table))

def test_a_run_is_its_settings(table, tmp_path):
    config = run(table, val_sentences=5)
    train(config, tmp_path / 'run')
    assert json.loads((tmp_path / 'run/run.json').read_text()) == settings(config)
    assert Translator.load(tmp_path / 'run').training['progress']['step'] == 20


# --- the model that comes with the package

RECORD = Path(__file__).parents[2]/'benchmarks/results/shipped-model.log.jsonl'

def losses(log): return {row['step']: row['loss'] for row in log if 'loss' in row}

def test_the_shipped_model_says_what_made_it():
    made = Translator.load().training
    assert differences(with_defaults(made['run']), with_defaults(settings(default_run()))) == []
    assert made['command'] == 'python benchmarks/shipped_model.py' and made['machine'] and made['date']
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 6e6 and made['test']['bleu'] > 95
    assert made['run']['corpus']['corpus'] == 'toy-ende'                       # our own data: nobody else's terms

def test_its_score_is_its_own():
    translator, pairs = Translator.load(), load_corpus(CorpusConfig())['test']
    assert evaluate(translator, pairs)[0].bleu == pytest.approx(translator.training['test']['bleu'], abs=0.1)

def test_its_command_goes_the_same_way_again(tmp_path):
    "The first steps of a new run lose what the record's did, as far as another number of threads allows."
    again = {}
    def watch(rows):
        again.update(losses(rows))
        if len(again) == 3: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train_translator(default_run(), tmp_path/'run', progress_bar=False, watch=watch)
    before = losses(read_log(RECORD))
    assert again.keys() == {20, 40, 60} and again == pytest.approx({step: before[step] for step in again}, rel=1e-3)

@pytest.mark.full
def test_retraining_reaches_it(tmp_path):
    translator = train(default_run(), tmp_path/'run')
    assert (evaluate(translator, load_corpus(CorpusConfig())['test'])[0].bleu
            > Translator.load().training['test']['bleu'] - 1)
