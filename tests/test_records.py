"What the scripts in benchmarks/ write into records, and what they refuse to overwrite."
import argparse
import ast
import asyncio
import gzip
import json
import math
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from sacrebleu.metrics import CHRF

sys.path.insert(0, str(Path(__file__).parents[1] / 'benchmarks'))
import attention_adversaries
import caption_attention
import claims
import engines
import errors
import gpu
import head_orders
import mbr
import own_experiment
import paired
import recipe
import record
import recurrent
import serving
import site_speed
import train_speed

from annotated_transformer.batches import collate, encode_pairs
from annotated_transformer.checkpoints import build_model
from annotated_transformer.cli import parse_values
from annotated_transformer.corpora import Corpus, CorpusConfig, load_corpus
from annotated_transformer.experiments import t_interval, t_quantile
from annotated_transformer.files import checksum
from annotated_transformer.recipe import RECIPES, RunConfig, evaluate
from annotated_transformer.recurrent import RecurrentConfig
from annotated_transformer.relative_positions import RelativeConfig
from annotated_transformer.scoring import score
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.trainer import TrainConfig
from annotated_transformer.transformer import Transformer, TransformerConfig, count_parameters
from annotated_transformer.translator import SHIPPED, Translator


@pytest.fixture
def corpus(monkeypatch):
    "A few sentences; long ones for validation, where the searches differ."
    complete = load_corpus(CorpusConfig('toy-ende'))
    splits = {'val': complete['test_long'][:24], 'test': complete['test'][:24]}
    monkeypatch.setattr(record, 'load_corpus', lambda config: Corpus('few', complete.langs, splits))
    return splits


def make_record(tmp_path, monkeypatch, *flags):
    "Make a record of the shipped model, as if it came from a run."
    run = shutil.copytree(SHIPPED, tmp_path / 'run', dirs_exist_ok=True)
    (run / 'log.jsonl').write_text('{"step": 20, "loss": 2.0}\n{"step": 20, "val_loss": 1.0}\n')
    (run / 'clock.jsonl').write_text('{"step": 20, "minutes": 0.1, "tokens_per_second": 9}\n'
                                     '{"step": 20, "minutes": 0.2}\n')
    monkeypatch.setattr(record, 'RESULTS', tmp_path)
    arguments = ['record.py', str(run), 'toy', '--split', 'test', '--command', 'make toy', *flags]
    monkeypatch.setattr(sys, 'argv', arguments)
    record.main()
    return json.loads((tmp_path / 'toy.json').read_text('utf-8'))


def test_best_search_on_val_translates_the_other_splits(tmp_path, monkeypatch, corpus):
    found = make_record(tmp_path, monkeypatch, '--beam-size', '1', '4', '--length-penalty', '0.0', '2.0')
    tried = found['tried_on_val']
    assert list(tried) == [f'beam {beam}, length penalty {penalty}' for beam in (1, 4) for penalty in (0.0, 2.0)]
    assert len(set(tried.values())) > 1
    chosen = found['search']
    best = tried[f"beam {chosen['beam_size']}, length penalty {chosen['length_penalty']}"]
    assert best == max(tried.values()) == found['scores']['val']['bleu']
    for split, pairs in corpus.items():
        scores, _ = evaluate(Translator.load(), pairs, **chosen)
        assert found['scores'][split]['bleu'] == scores.bleu


def test_a_record_says_what_was_measured(tmp_path, monkeypatch, corpus):
    found = make_record(tmp_path, monkeypatch)
    assert found['search'] == {'beam_size': 4, 'length_penalty': 0.6}
    assert 'tried_on_val' not in found
    assert 'dropped_pairs' not in found # this log does not say
    assert 'note' not in found
    assert found['command'] == 'make toy'
    assert found['name'] == 'toy'
    assert found['weights_sha256'] == checksum(SHIPPED / 'model.safetensors')['sha256']
    assert not found['settings']['corpus'].keys() & set(record.PATHS)
    assert found['settings']['corpus']['extra'] is False
    assert [sample['source'] for sample in found['samples']] == [src for src, _ in corpus['test'][::3]]
    assert {sample['split'] for sample in found['samples']} == {'test'}
    rows = [json.loads(line) for line in (tmp_path / 'toy.log.jsonl').read_text().splitlines()]
    assert rows == [{'step': 20, 'loss': 2.0, 'minutes': 0.1, 'tokens_per_second': 9},
                    {'step': 20, 'val_loss': 1.0, 'minutes': 0.2}]


def test_a_record_counts_the_pairs_that_were_dropped(tmp_path, monkeypatch, corpus):
    rows = [{'step': 0, 'epoch': 0, 'dropped_held out': 3, 'dropped_blank': 0, 'covered_by_vectors': 1.0}, {'step': 20, 'loss': 2.0}]
    (tmp_path / 'log').write_text('')
    monkeypatch.setattr(record, 'timed_log', lambda run: rows)
    found = make_record(tmp_path, monkeypatch, '--note', 'two runs at once')
    assert found['dropped_pairs'] == {'held out': 3, 'blank': 0}
    assert found['note'] == 'two runs at once'
    assert record.dropped_pairs([]) == record.dropped_pairs(rows[1:]) == {}


def test_records_say_how_many_pairs_were_dropped():
    "All whose log says so. The runs of version 0.1.0 did not count pairs that are held out."
    counted = 0
    for path in sorted(record.RESULTS.glob('*.log.jsonl')):
        of_run = record.RESULTS / path.name.replace('.log.jsonl', '.json')
        if of_run.exists():
            dropped = record.dropped_pairs([json.loads(path.read_text('utf-8').splitlines()[0])])
            assert json.loads(of_run.read_text('utf-8')).get('dropped_pairs', {}) == dropped, of_run.name
            counted += 'held out' in dropped
    assert counted >= 16


def tokenized_records():
    "The records of text that is lower-cased and tokenized, whose translations were kept."
    found = {path.name.removesuffix('.test.txt'): path for path in record.RESULTS.glob('*.test.txt')}
    del found['mbr-chrf'], found['mbr-bleu'] # see mbr.json
    records = {name: json.loads((record.RESULTS / f'{name}.json').read_text('utf-8')) for name in found}
    return {name: each for name, each in records.items() if 'bleu' not in each['scores']['test']}


def test_tokenized_records_have_the_chrf_of_their_translations():
    "The same value as that of paired.py, whose counts equal sacreBLEU's."
    by_setting = json.loads((record.RESULTS / 'paired.json').read_text('utf-8'))['settings']
    found = tokenized_records()
    assert len(found) >= 6
    for setting, values in by_setting.items():
        for seed, chrf in zip(paired.SEEDS, values['chrf'], strict=True):
            scores = found[f'{setting}-seed{seed}']['scores']['test']
            assert scores['lowercased_tokenized_chrf'] == pytest.approx(chrf, abs=1e-6)
            assert scores['lowercased_tokenized_chrf_signature'].startswith('nrefs:1|case:mixed|eff:yes|nc:6|nw:0')
            metrics = found[f'{setting}-seed{seed}']['metrics']
            assert metrics['test_lowercased_tokenized_chrf'] == round(chrf, 2)


def fairseq_bleu(translations, references):
    "BLEU as fairseq's scorer computes it: split at spaces, clipped counts, no smoothing, one brevity penalty."
    matches, totals, lengths = [0] * 4, [0] * 4, [0, 0]
    for translation, reference in zip(translations, references, strict=True):
        ours, theirs = translation.split(), reference.split()
        lengths = [lengths[0] + len(ours), lengths[1] + len(theirs)]
        for n in range(1, 5):
            counts = [Counter(tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)) for tokens in (ours, theirs)]
            matches[n - 1] += sum(min(count, counts[1][ngram]) for ngram, count in counts[0].items())
            totals[n - 1] += max(0, len(ours) - n + 1)
    precisions = [100 * a / b for a, b in zip(matches, totals)]
    return min(1, math.exp(1 - lengths[1] / lengths[0])) * statistics.geometric_mean(precisions), lengths


def test_bleu_of_tokenized_text_is_that_of_fairseq(corpus):
    references = [tgt.lower().replace('.', ' .') for _, tgt in corpus['val']]
    translations = [text.replace('die', 'der').removesuffix(' .') for text in references]
    found = record.report_tokenized(translations, references)
    assert found['lowercased_tokenized_bleu'] == pytest.approx(fairseq_bleu(translations, references)[0])
    assert found['lowercased_tokenized_bleu'] < 95
    chrf = paired.chrf_parts(paired.chrf_counts(translations, references))[0]
    assert found['lowercased_tokenized_chrf'] == pytest.approx(chrf)


DATA = Path(__file__).resolve().parents[2] / 'shared' / 'data'


@pytest.mark.skipif(not (DATA / 'multi30k-tok').is_dir(), reason='needs Multi30k in ../shared/data')
def test_recorded_bleu_of_tokenized_text_is_that_of_fairseq():
    "On the file whose tokens are as many as in the reference of Wu et al."
    with gzip.open(DATA / 'multi30k-tok/test_2016_flickr.lc.norm.tok.de.gz', 'rt', encoding='utf-8') as file:
        references = file.read().splitlines()
    for name, each in tokenized_records().items():
        translations = (record.RESULTS / f'{name}.test.txt').read_text('utf-8').splitlines()
        bleu, (_, reference_length) = fairseq_bleu(translations, references)
        assert each['scores']['test']['lowercased_tokenized_bleu'] == pytest.approx(bleu), name
        assert reference_length == 12103


def test_counts_give_the_bleu_of_sacrebleu(corpus):
    references = [tgt for _, tgt in corpus['val']]
    translations = [text.replace('die', 'der').removesuffix(' .') for text in references]
    assert translations != references
    counts = record.bleu_counts(translations, references)
    assert record.bleu_of(counts) == pytest.approx(score(translations, references).bleu)
    assert record.bleu_of(counts[:5]) == pytest.approx(score(translations[:5], references[:5]).bleu)


def test_groups_by_source_length_hold_each_sentence_once(corpus):
    sources = [src for src, _ in corpus['val']] + [src for src, _ in corpus['test']]
    references = [tgt for _, tgt in corpus['val']] + [tgt for _, tgt in corpus['test']]
    counts = record.bleu_counts(references, references)
    counts[:, :4] //= 2 # half of the n-grams match
    found = record.by_source_length(sources, counts)
    assert sum(part['sentences'] for part in found.values()) == len(sources)
    for name, part in found.items():
        low, high = map(int, name.split('-'))
        inside = [low <= len(source.split()) <= high for source in sources]
        assert part['bleu'] == record.bleu_of(counts[inside])
        assert part['sentences'] == sum(inside)
        assert part['low'] <= part['bleu'] <= part['high']


def test_a_record_keeps_its_translations_and_is_compared_with_another(tmp_path, monkeypatch, corpus):
    found = make_record(tmp_path, monkeypatch)
    assert 'paired_test' not in found['scores']['test']
    kept = (tmp_path / 'toy.test.txt').read_text().splitlines()
    assert kept == evaluate(Translator.load(), corpus['test'], **found['search'])[1]
    assert not (tmp_path / 'toy.val.txt').exists()
    worse = [' '.join(line.split()[::-1]) for line in kept]
    (tmp_path / 'worse.test.txt').write_text(''.join(line + '\n' for line in worse))
    test = make_record(tmp_path, monkeypatch, '--against', 'worse')['scores']['test']['paired_test']
    references = [tgt for _, tgt in corpus['test']]
    assert test['against'] == 'worse'
    assert test['difference'] == pytest.approx(score(kept, references).bleu - score(worse, references).bleu)
    assert 0 < test['low'] < test['difference'] < test['high']
    assert test['p_value'] < 0.01
    same = record.paired_test(kept, kept, references)
    assert same['difference'] == same['low'] == same['high'] == 0
    assert same['p_value'] == 1


def test_paths_of_extra_text_are_left_out():
    settings = {'corpus': 'files', 'src': 'a', 'extra_src': 'b', 'val_tsv': 'c', 'test_tsv': 'd', 'unique': True}
    assert record.public_settings(settings) == {'corpus': 'files', 'unique': True, 'extra': True}


def test_variants_are_selected_by_name_or_part():
    def selected(*only):
        return [name for name in recipe.VARIANTS if recipe.wanted(name, only)]
    assert selected('dropout 0.1') == ['dropout 0.1'] # and not BPE-dropout 0.1
    assert selected('R-Drop', 'ALiBi') == ['R-Drop 1', 'R-Drop 5', 'ALiBi']
    assert selected() == list(recipe.VARIANTS)


def test_paired_variants_have_the_seeds_of_the_recipe():
    runs = recipe.planned(['dropout 0.1'], True)
    assert runs == recipe.SEEDS | {'dropout 0.1': '--dropout 0.1', 'dropout 0.1, seed 2': '--dropout 0.1 --seed 2',
                                   'dropout 0.1, seed 3': '--dropout 0.1 --seed 3'}
    assert recipe.planned([], False) == recipe.SEEDS | recipe.VARIANTS
    assert TrainConfig().seed == 1


def test_variants_are_compared_seed_by_seed():
    rows = {f'the recipe, seed {seed}': {'val_bleu': 30.0 + seed, 'val_chrf': 60.0} for seed in (1, 2, 3)}
    for variant, gains in (('dropout 0.1', (1.0, 1.2, 1.4)), ('R-Drop 5', (-2.0, 0.0, 2.0))):
        rows |= {name: {'val_bleu': 30.0 + seed + gain, 'val_chrf': 60.0 - gain}
                 for seed, (name, gain) in enumerate(zip(recipe.run_names(variant), gains), 1)}
    rows['dropout 0.2'] = rows['dropout 0.1'] # one seed: not compared
    found, noise = recipe.paired(rows)
    assert list(found) == ['dropout 0.1', 'R-Drop 5']
    bleu = found['dropout 0.1']['val_bleu']
    assert bleu['differences'] == pytest.approx([1.0, 1.2, 1.4])
    assert bleu['alone'] == pytest.approx(t_interval([1.0, 1.2, 1.4])) and bleu['alone'][0] > 0
    assert found['dropout 0.1']['val_chrf']['differences'] == pytest.approx([-1.0, -1.2, -1.4])
    low, high = found['R-Drop 5']['val_bleu']['interval']
    assert low < 0 < high
    assert noise['val_bleu']['degrees_of_freedom'] == 4
    assert recipe.paired({name: row for name, row in rows.items() if 'seed' in name}) == ({}, {})


def test_the_noise_of_all_settings_is_taken_together():
    "A block design is least squares on indicators of settings and seeds: both find the same intervals."
    numbers = np.random.default_rng(0)
    variants = list(recipe.VARIANTS)[:4]
    runs = [list(recipe.SEEDS), *map(recipe.run_names, variants)]
    rows = {name: dict.fromkeys(recipe.METRICS, numbers.normal(30, 2)) for names in runs for name in names}
    columns = [[float(i == setting) for setting in range(5)] + [float(j == seed) for seed in (1, 2)]
               for i in range(5) for j in range(3)]
    design = np.array(columns)
    scores = np.array([rows[name]['val_bleu'] for names in runs for name in names])
    effects, rest, rank, _ = np.linalg.lstsq(design, scores, rcond=None)
    df = len(scores) - int(rank)
    spread = math.sqrt(rest[0] / df)
    found, noise = recipe.paired(rows)
    assert noise['val_bleu'] == pytest.approx({'spread': spread, 'degrees_of_freedom': df})
    inverse = np.linalg.inv(design.T @ design)
    for i, name in enumerate(variants, 1):
        error = spread * math.sqrt(inverse[i, i] + inverse[0, 0] - 2 * inverse[0, i])
        for kind, confidence in (('interval', 0.95), ('corrected', 1 - 0.05 / 22)):
            half_width = t_quantile(df, confidence) * error
            difference = effects[i] - effects[0]
            assert found[name]['val_bleu'][kind] == pytest.approx((difference - half_width, difference + half_width))


def test_flags_of_the_scripts_are_names_of_settings():
    known = {field.name for config in (RunConfig, TrainConfig, TransformerConfig) for field in fields(config)}
    texts = [*recipe.VARIANTS.values(), *recipe.SEEDS.values()]
    flags = {word for text in texts for word in shlex.split(text) if word.startswith('--')}
    assert flags and {flag[2:].replace('-', '_') for flag in flags} <= known


# --- gpu.py

@pytest.fixture
def gpu_arguments(tmp_path):
    "A function that parses arguments of gpu.py, with folders for the data."
    for name in ('multi30k', 'multi30k-tok'):
        (tmp_path / 'data' / name).mkdir(parents=True)
    return lambda part, *more: gpu.arguments([part, '--data-dir', str(tmp_path / 'data'), '--runs', str(tmp_path), *more])


@pytest.mark.parametrize('part', gpu.PARTS)
def test_flags_of_every_gpu_run_exist(gpu_arguments, tmp_path, part):
    args = gpu_arguments(part)
    for run in gpu.PARTS[part]:
        _, values = parse_values(gpu.train_arguments(run, tmp_path / run.name, args))
        assert values['max_epochs'] in (45, 55, 70) and values['seed'] in gpu.SEEDS and values['out'] == tmp_path / run.name
        assert values['max_minutes'] is None
        scored = record.arguments(gpu.score_arguments(run, args))
        assert scored.name == run.name and scored.split == list(run.splits) and 'DIR/multi30k' in scored.command
        assert scored.tokenized == ('multi30k-tok' in run.options) == (scored.split == ['test'])
        assert scored.note == f'{len(gpu.PARTS[part])} runs shared one GPU (benchmarks/gpu.py {part})'


def test_gpu_runs_have_three_seeds_and_names_of_their_own():
    runs = sum(gpu.PARTS.values(), [])
    assert len({run.name for run in runs}) == len(runs)
    seeds = {}
    for run in runs:
        setting, seed = run.name.rsplit('-seed', 1)
        assert run.options.endswith(f'--seed {seed}')
        seeds.setdefault((setting, run.options.rsplit(' ', 1)[0]), []).append(int(seed))
    assert all(found == [1, 2, 3] for found in seeds.values())
    assert len(seeds) == len({setting for setting, _ in seeds}) == len({options for _, options in seeds})


def test_three_languages_have_one_setting(gpu_arguments, tmp_path):
    found = []
    for part, name in (('baseline', 'gpu-en-de'), ('full', 'gpu-de-en'), ('full', 'gpu-en-fr')):
        (run,) = [run for run in gpu.PARTS[part] if run.name == f'{name}-seed2']
        _, values = parse_values(gpu.train_arguments(run, tmp_path, gpu_arguments(part)))
        assert values.pop('recipe') == f"multi30k-{name.removeprefix('gpu-')}"
        found.append({key: value for key, value in values.items() if key not in ('pair', 'langs')})
    assert found[0] == found[1] == found[2]


def test_a_limit_in_minutes_is_trained_with_and_recorded(gpu_arguments, tmp_path):
    args = gpu_arguments('full', '--max-minutes', '9.5')
    run = gpu.PARTS['full'][0]
    _, values = parse_values(gpu.train_arguments(run, tmp_path / run.name, args))
    assert values['max_minutes'] == 9.5
    assert record.arguments(gpu.score_arguments(run, args)).command.endswith('--max-minutes 9.5')


def test_gpu_records_are_those_of_the_part_full():
    for run in gpu.PARTS['full']:
        command = json.loads((record.RESULTS / f'{run.name}.json').read_text('utf-8'))['command']
        options = run.options.replace('{data}', 'DIR') + ' --max-minutes 11.5'
        assert sorted(shlex.split(command.split(' train ')[1])) == sorted(shlex.split(options)), run.name


def test_speed_on_a_gpu_is_measured_with_the_flags_of_its_records(monkeypatch):
    for size, options in gpu.SPEED.items():
        monkeypatch.setattr(sys, 'argv', ['train_speed.py', *options])
        assert train_speed.arguments().sizes == [size]
        command = json.loads((record.RESULTS / f'train-speed-gpu-{size}.json').read_text('utf-8'))['command']
        words = shlex.split(command.replace(' --data-dir DIR', ''))[2:]
        assert sorted(words) == sorted(options)


def test_parts_are_at_most_nine_minutes_long(gpu_arguments, tmp_path, capsys):
    assert gpu_arguments('full', '--minutes', '9').minutes == 9
    assert gpu_arguments('full').minutes < 9
    for wrong, message in (('9.5', '9.5 minutes: choose from 1 to 9'), ('0.5', '0.5 minutes: choose from 1 to 9')):
        with pytest.raises(SystemExit):
            gpu_arguments('full', '--minutes', wrong)
        assert message in capsys.readouterr().err
    (tmp_path / 'data/multi30k-tok').rmdir()
    with pytest.raises(SystemExit):
        gpu_arguments('full')
    assert 'has no folder multi30k-tok' in capsys.readouterr().err


def test_a_part_continues_with_the_runs_without_a_record(gpu_arguments, tmp_path, monkeypatch, capsys):
    "One run has a record, one ends and is scored, one fails, one saves and ends at the time limit."
    runs = [gpu.Run(name, '--seed 1', ('test',)) for name in ('done', 'quick', 'broken', 'slow')]
    programs = {'quick': 'pass', 'broken': "raise SystemExit('no such file')",
                'slow': "import pathlib, signal, sys, time\n"
                        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).touch(), sys.exit(143)))\n"
                        "print('step 7', flush=True)\ntime.sleep(60)"}
    started = []

    def train(run, args):
        started.append(run.name)
        return gpu.start(['-c', programs[run.name], str(tmp_path / 'saved')], tmp_path / f'{run.name}.txt')

    def score(run, args):
        code = f"open({str(tmp_path / f'{run.name}.json')!r}, 'w').write('{{}}'); print('test_bleu 40.00')"
        return gpu.start(['-c', code], tmp_path / f'{run.name}.txt')

    monkeypatch.setattr(gpu, 'RESULTS', tmp_path)
    monkeypatch.setattr(gpu, 'train', train)
    monkeypatch.setattr(gpu, 'score', score)
    (tmp_path / 'done.json').write_text('{}')
    args = gpu_arguments('full')
    args.minutes = (gpu.STOPPING + 2.5) / 60
    gpu.train_part(runs, args)
    assert started == ['quick', 'broken', 'slow']
    assert (tmp_path / 'saved').exists() # before it was killed
    output = capsys.readouterr().out
    assert 'quick scored: test_bleu 40.00' in output and 'broken failed: no such file' in output
    assert '2 of 4 runs are done\nrun the same command again to continue with broken slow\n' in output
    started.clear()
    monkeypatch.setitem(programs, 'broken', 'pass')
    monkeypatch.setitem(programs, 'slow', 'pass')
    gpu.train_part(runs, args)
    assert started == ['broken', 'slow'] and '4 of 4 runs are done\n' == capsys.readouterr().out.split('40.00\n')[-1]


def test_flags_of_every_run_of_the_sweep_exist(gpu_arguments, tmp_path):
    args = gpu_arguments('sweep')
    found = {}
    for name, run in gpu.SWEEP_RUNS.items():
        _, found[name] = parse_values(gpu.train_arguments(run, tmp_path / 'run', args))
    base = found['the recipe, seed 2']
    assert (base['recipe'], base['max_tokens'], base['max_epochs'], base['seed']) == ('multi30k-en-de', 4096, 12, 2)
    for variant in gpu.SWEEP:
        for seed, name in zip(gpu.SEEDS, recipe.run_names(variant), strict=True):
            assert found[name]['seed'] == seed and found[name] != base | {'seed': seed}
            changed = {key for key, value in found[name].items() if value != base[key]} - {'seed'}
            assert len(changed) == 1 or variant.startswith('wide model'), changed # one change at a time
    assert len({run.name for run in gpu.SWEEP_RUNS.values()}) == 3 * (1 + len(gpu.SWEEP)) == len(found)
    assert not any(part in run.name for run in gpu.SWEEP_RUNS.values() for part in ' ,/')


def test_sweep_has_no_limit_in_minutes(gpu_arguments, capsys):
    with pytest.raises(SystemExit):
        gpu_arguments('sweep', '--max-minutes', '5')
    assert 'compared at the same length: leave --max-minutes out' in capsys.readouterr().err


def test_a_queue_keeps_some_runs_going(gpu_arguments, tmp_path, monkeypatch, capsys):
    "Twelve runs of a sweep, five at a time: in their order; one has ended before, and one fails."
    at_once, started = [], []

    def train(run, args):
        started.append(run.name)
        folder = tmp_path / run.name
        code = ("import pathlib, sys, time\nfolder = pathlib.Path(sys.argv[1])\nfolder.mkdir()\ntime.sleep(0.4)\n"
                "if sys.argv[1].endswith('run7'): sys.exit('no such file')\n(folder / 'training.json').write_text('{}')")
        process = gpu.start(['-c', code, str(folder)], tmp_path / f'{run.name}.txt')
        processes.append(process)
        at_once.append(sum(each.poll() is None for each in processes))
        return process

    processes = []
    monkeypatch.setattr(gpu, 'JOBS', 5)
    monkeypatch.setattr(gpu, 'train', train)
    monkeypatch.setattr(gpu, 'score', lambda run, args: pytest.fail('training scores val'))
    runs = [gpu.Run(f'run{n}', '--seed 1', ()) for n in range(12)]
    (tmp_path / 'run3').mkdir()
    (tmp_path / 'run3/training.json').write_text('{}')
    gpu.train_part(runs, gpu_arguments('sweep'))
    assert started == [run.name for run in runs if run.name != 'run3'] and max(at_once) == 5
    output = capsys.readouterr().out
    assert 'run7 failed: no such file' in output and 's left, run11 is done' in output
    assert '11 of 12 runs are done\nrun the same command again to continue with run7\n' in output


def finish_runs(folder, variants, gain=1.0):
    "Write what training leaves of the recipe's runs and of some variants', better by about `gain` BLEU."
    for variant in [None, *variants]:
        for seed, name in enumerate(recipe.run_names(variant) if variant else recipe.SEEDS, 1):
            bleu = 36.0 + 0.3 * seed + (gain + 0.1 * seed if variant else 0)
            run = folder / gpu.SWEEP_RUNS[name].name
            run.mkdir()
            (run / 'training.json').write_text(json.dumps({
                'val': {'bleu': bleu, 'chrf': bleu + 20, 'signature': 'nrefs:1'}, 'progress': {'minutes': 2.0, 'step': 1392}}))


def test_record_of_a_sweep_holds_what_three_seeds_have_finished(gpu_arguments, tmp_path, monkeypatch, capsys):
    args = gpu_arguments('sweep')
    monkeypatch.setattr(gpu, 'RESULTS', tmp_path)
    gpu.write_sweep(args)
    assert 'no record yet' in capsys.readouterr().out and not (tmp_path / 'gpu-recipe-paired.json').exists()
    finish_runs(tmp_path, ['R-Drop 5', 'dropout 0.2', 'post-norm'])
    (tmp_path / 'sweep-post-norm-seed-3/training.json').unlink() # two seeds
    gpu.write_sweep(args)
    found = json.loads((tmp_path / 'gpu-recipe-paired.json').read_text('utf-8'))
    rows = found['metrics']['variants']
    assert list(rows) == [*recipe.SEEDS, *recipe.run_names('dropout 0.2'), *recipe.run_names('R-Drop 5')]
    assert rows['R-Drop 5, seed 2']['flags'] == '--r-drop 5 --seed 2' and rows['R-Drop 5, seed 2']['val_bleu'] == 36.6 + 1.2
    assert list(found['metrics']['paired']) == ['dropout 0.2', 'R-Drop 5']
    assert found['metrics']['paired']['R-Drop 5']['val_chrf']['differences'] == pytest.approx([1.1, 1.2, 1.3])
    assert found['metrics']['mean'] == pytest.approx(36.6)
    assert found['left_out'] == [name for name in gpu.SWEEP if name not in ('R-Drop 5', 'dropout 0.2')]
    assert found['search'] == {'beam_size': 4, 'length_penalty': 0.6} and found['epochs'] == 12
    output = capsys.readouterr().out
    assert 'R-Drop 5                     +1.07 to +1.33 BLEU' in output and 'left out: dropout 0.1, R-Drop 1' in output


def test_another_recipe_does_not_overwrite_a_record(tmp_path):
    args = SimpleNamespace(out=tmp_path / 'recipe.json', epochs=12, flags='')
    new = recipe.recorded(args)
    assert new['recipe'] == RECIPES['multi30k-en-de']
    args.out.write_text(json.dumps(new))
    assert recipe.recorded(args) == new
    for other in {'epochs': 3}, {'machine': 'another'}:
        args.out.write_text(json.dumps(new | other))
        with pytest.raises(SystemExit, match=f'another {next(iter(other))}: choose another --out'):
            recipe.recorded(args)


# --- claims.py

@pytest.fixture
def run_claims(tmp_path, monkeypatch):
    "A function that runs claims.py on a pretended trainer: the record, and the runs that were trained."
    trained = []

    def run(settings, seed):
        trained.append((settings['n_heads'], seed))
        return {'seed': seed, 'train_loss': [7.0], 'val_loss': 1.0}

    def main(*flags):
        trained.clear()
        out = tmp_path / 'claims.json'
        monkeypatch.setattr(sys, 'argv', ['claims.py', '--only', 'base', '--only', '1 head', '--out', str(out), *flags])
        claims.main()
        return json.loads(out.read_text('utf-8')), list(trained)

    monkeypatch.setattr(claims, 'run', run)
    return main


def test_every_case_is_trained_with_the_same_seeds_seed_by_seed(run_claims):
    found, trained = run_claims('--seeds', '2', '3')
    assert trained == [(4, 2), (1, 2), (4, 3), (1, 3)]
    assert [run['seed'] for run in found['cases']['1 head']['runs']] == [2, 3]


def test_plan_has_enough_seeds_for_each_case():
    runs = claims.planned_runs(claims.CASES)
    seeds = {name: [seed for seed, case in runs if case == name] for name in claims.CASES}
    assert seeds['base'] == list(range(2, 11))
    assert seeds['16 heads'] == list(range(2, 7))
    assert seeds['pre-norm, warm-up, 0.009'] == list(range(2, 11))
    assert seeds['pre-norm, warm-up, 0.027'] == list(range(2, 7))
    assert seeds['batch 250, 0.004'] == list(range(2, 7))
    assert len(runs) == len(set(runs)) == sum(map(len, seeds.values()))


def test_finished_runs_are_not_trained_again(run_claims):
    run_claims('--seeds', '2')
    found, trained = run_claims('--seeds', '2', '3')
    assert trained == [(4, 3), (1, 3)]
    assert len(found['cases']['base']['runs']) == 2


def test_no_run_starts_after_the_deadline(run_claims, monkeypatch):
    run_claims('--seeds', '2')
    _, trained = run_claims('--seeds', '2', '3', '--minutes', '0')
    assert trained == []


def test_a_record_with_other_settings_is_kept(run_claims, monkeypatch):
    run_claims('--seeds', '2')
    monkeypatch.setitem(claims.CASES, 'base', claims.BASE | {'tokens': 5})
    with pytest.raises(SystemExit, match="other settings of 'base': choose another --out"):
        run_claims('--seeds', '2')


def test_without_warm_up_the_learning_rate_starts_at_its_peak():
    warm = [claims.lr_at(step, claims.BASE) for step in range(1, 300)]
    cold = [claims.lr_at(step, claims.BASE | {'warm_up': False}) for step in range(1, 300)]
    assert max(warm) == cold[0] == claims.BASE['peak_lr']
    assert warm[0] < 0.02 * cold[0]
    assert warm[99:] == cold[99:]


def test_serving_answers_every_good_request_and_survives_the_bad_ones():
    "The measurement in small: nothing lost, no translation of another client, no traceback."
    found = serving.soak(SHIPPED, [pair.src for pair in toy_ende('test', n=50)], 140)
    assert found['statuses'] == {'200': 126} and found['good'] == found['own_translation'] == 126
    assert found['tracebacks'] == found['resends'] == 0
    assert found['bad'] == {
        'invalid JSON': {'400': 2}, 'a number for q': {'400': 2}, 'an unknown language': {'400': 2},
        '300,000 bytes': {'413': 2}, 'not HTTP': {'400': 2},
        'cut off': {'closed by the server without an answer within 5 seconds': 2},
        'the client leaves': {'sent, then closed by the client': 2}}


def with_server(answer, ask):
    "What `ask`, a function of a port, returns beside a server whose connections are served by `answer`."
    async def run():
        async with await asyncio.start_server(answer, '127.0.0.1', 0) as server:
            return await ask(server.sockets[0].getsockname()[1])
    return asyncio.run(run())


def test_serving_counts_what_is_sent_again():
    "A server that closes every connection after its first answer: each later request is sent twice, none is lost."
    async def answer_once(reader, writer):
        head = await reader.readuntil(b'\r\n\r\n')
        await reader.readexactly(int(re.search(rb'Content-Length: (\d+)', head)[1]))
        body = b'{"translatedText": "ja"}'
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n' % len(body) + body)
        writer.close()

    n_jobs = 2 * serving.N_CLIENTS
    jobs = [('A dog.', None)] * n_jobs
    results, resends = with_server(answer_once, lambda port: serving.send_all(port, jobs, lambda n: None))
    assert [result for _, result in results] == [(200, 'ja')] * n_jobs
    assert serving.N_CLIENTS / 2 < resends <= n_jobs


@pytest.mark.parametrize('answer, seen', [
    (b'HTTP/1.1 400 Bad Request\r\n\r\n', '400'), (b'', 'closed by the server without an answer within 5 seconds'),
    (None, 'still open after 0.2 seconds')])
def test_serving_observes_what_a_cut_off_request_leads_to(monkeypatch, answer, seen):
    async def respond(reader, writer):
        await reader.read()
        if answer is None:
            await asyncio.sleep(1)
        else:
            writer.write(answer)
        writer.close()

    if answer is None:
        monkeypatch.setattr(serving, 'CLOSED_IN_TIME', 0.2)
    assert with_server(respond, lambda port: serving.Client(port).bad('cut off')) == seen


def test_serving_with_a_patience_uses_it_in_the_server_and_offline():
    "The two agree on every sentence, and on others than with the model's own settings."
    sentences = [pair.src for pair in toy_ende('test', n=64)]
    found = serving.throughput(SHIPPED, sentences, 1, patience=0.25)
    assert (found['same'], found['patience'], found['threads']) == (64, 0.25, torch.get_num_threads())
    assert found['resends'] == 0
    for name in ('offline', 'served', 'ratio', 'processor_ratio', 'median_ms', 'p95_ms'):
        (value,) = found['by_round'][name]
        assert found[name] == [round(value, 3 if 'ratio' in name else 1)] * 3
    translator = Translator.load(device='cpu')
    own, patient = [serving.offline(translator, sentences, patience)[0] for patience in (None, 0.25)]
    assert own == translator.translate(sentences) and patient == translator.translate(sentences, patience=0.25)
    assert sum(a != b for a, b in zip(own, patient)) > 16


def measure_serving(tmp_path, monkeypatch, *flags):
    "Run benchmarks/serving.py without measuring. Return its record: of each part, sentences, rounds and patience."
    monkeypatch.setattr(serving, 'throughput', lambda model, sentences, *settings: {'settings': settings})
    monkeypatch.setattr(serving, 'soak', lambda *_: {'settings': []})
    with gzip.open(tmp_path / 'texts.gz', 'wt') as file:
        file.write('A dog.\n')
    (tmp_path / 'plain.txt').write_text('A dog.\n')
    monkeypatch.setattr(sys, 'argv', ['serving.py', '--model', str(SHIPPED), '--texts', str(tmp_path / 'texts.gz'),
                                      '--rounds', '2', '--out', str(tmp_path / 'serving.json'), *flags])
    serving.main()
    record = json.loads((tmp_path / 'serving.json').read_text())
    for name, part in record.items():
        if isinstance(part, dict) and 'settings' in part:
            assert part['model']['weights_sha256'] == checksum(SHIPPED / 'model.safetensors')['sha256']
            assert part['model']['config'] == json.loads((SHIPPED / 'config.json').read_text())
            assert part['model']['corpus']['corpus'] == 'toy-ende'
            is_given = name.startswith('recipe') # 'A dog.' is the file of --texts
            assert (part['texts_sha256'] == checksum(tmp_path / 'plain.txt')['sha256']) == is_given
            assert len(part['load_at_start']) == 3
    assert str(tmp_path) not in json.dumps(record)
    return {name: part['settings'] for name, part in record.items() if isinstance(part, dict) and 'settings' in part}


def test_serving_measures_the_recipe_with_a_patience_as_a_part_of_its_own(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        measure_serving(tmp_path, monkeypatch, '--part', 'recipe_patience')
    assert 'add --patience 1' in capsys.readouterr().err
    found = measure_serving(tmp_path, monkeypatch, '--part', 'recipe_patience', '--patience', '1')
    assert found == {'recipe_patience': [2, 1.0]}
    found = measure_serving(tmp_path, monkeypatch, '--part', 'recipe', '--patience', '0.5')
    assert found == {'recipe_patience': [2, 0.5], 'recipe': [2, None]}
    assert set(measure_serving(tmp_path, monkeypatch)) == {'recipe_patience', 'recipe', 'shipped', 'soak'}


@pytest.mark.parametrize('has_patience', [False, True])
def test_page_about_serving_shows_the_default_search_if_the_record_has_it(tmp_path, monkeypatch, capsys, has_patience):
    root = Path(__file__).parents[1]
    record = json.loads((root / 'benchmarks/results/serving.json').read_text())
    offline, served = record['recipe']['offline'], record['recipe']['served']
    record.pop('recipe_patience', None)
    if has_patience:
        offline = [3.14 * rate for rate in offline]
        record['recipe_patience'] = record['recipe'] | {'patience': 1.0, 'max_wait': 0.25, 'offline': offline}
    for folder in ('nbs', 'benchmarks/results'):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / 'benchmarks/results/serving.json').write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path / 'nbs')
    cells = json.loads((root / 'nbs/32_serving.ipynb').read_text('utf-8'))['cells']
    source = next(text for text in (''.join(cell['source']) for cell in cells) if 'results/serving.json' in text)
    shown = []
    exec(source, {'json': json, 'Markdown': str, 'display': shown.append, 'median': statistics.median})
    lines = shown[0].splitlines()
    assert all(line.count('|') == 5 for line in lines)
    smallest, middle, largest = [f'{rate:,.0f}' for rate in offline]
    assert lines[2] == f'| offline, sentences per second | {middle} | {smallest} | {largest} |'
    printed = capsys.readouterr().out
    assert ('--beam-patience 1.0, --max-wait 0.25\n' if has_patience else '--beam-patience inf, ') in printed
    assert f"32 clients / {served[1]:.0f} per second" in printed
    assert f"translates {record['recipe']['batches_at_a_time']} batches at a time" in printed
    assert f"in the server: {record['recipe']['server_processor_ms'][1]:.1f} ms" in printed
    (tmp_path / 'benchmarks/results/serving.json').unlink() # as on Colab
    exec(source, {'json': json, 'Markdown': str, 'display': shown.append, 'median': statistics.median})
    assert 'part of the repository' in capsys.readouterr().out


def test_page_about_serving_quotes_its_record():
    root = Path(__file__).parents[1]
    part = json.loads((root / 'benchmarks/results/serving.json').read_text())['recipe_patience']
    cells = json.loads((root / 'nbs/32_serving.ipynb').read_text('utf-8'))['cells']
    sources = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown']
    prose = ' '.join('\n'.join(sources).split())
    rounds = part['by_round']
    busy = statistics.median(rate * ms / 1000 / part['threads'] for rate, ms in zip(rounds['served'], rounds['server_processor_ms']))
    assert f"reaches {part['ratio'][1]:.2f} of the offline rate, although it keeps the cores {busy:.0%} busy" in prose
    in_server, in_loop, offline = [part[f'{name}_processor_ms'][1] for name in ('server', 'event_loop', 'offline')]
    assert f'more CPU time, {in_server} ms instead of {offline}.' in prose
    assert f'takes only {in_loop} ms' in prose
    assert f"a full queue means a wait of {serving.ServerConfig().max_waiting / part['served'][1]:.0f} seconds" in prose


def test_rules_find_each_kind_of_error():
    train = Counter({'ein': 900, 'hund': 90, 'läuft': 50, 'über': 40, 'gras': 9, 'zwei': 80, 'terrier': 2, 'boston': 5})
    reference = 'Ein Boston Terrier läuft über Gras.'
    def kinds(translation, source='A Boston Terrier runs on grass.', reference=reference):
        return errors.kinds(source, translation, reference, train, {'ein'})
    assert kinds('ein Boston Terrier läuft über Gras') == {'equal to the reference': ''}
    assert kinds('Ein Boston Terrier läuft.') == {'far too short': '4 of 6 words'}
    assert kinds('Ein Boston Terrier läuft über ein Gras ein.') == {'far too long': '8 instead of 6 words'}
    assert kinds('Ein Boston Terrier läuft Gras Gras.') == {'repeated word': 'gras'}
    assert kinds('Ein Boston Terrier läuft über Grund.') == {'unknown word': 'grund'}
    assert kinds('Ein Hund läuft über Gras.') == {'lost name': 'Boston, Terrier'}
    assert kinds('Ein Terrier läuft über Gras.', 'A terrier runs.', 'Ein Hund läuft über Gras.') == {
        'copied source word': 'terrier'}
    assert kinds('Zwei Hund läuft über Gras.', 'Dogs', '3 Hund läuft über Gras.') == {'wrong number': '2 instead of 3'}
    assert 'wrong number' not in kinds('Zwei Hund läuft über Gras.', 'Dogs', '2 Hund läuft übers Gras.')


def test_sentences_are_grouped_by_the_length_of_the_source():
    sources = [' '.join(['a'] * n) for n in (9, 2, 5, 7, 2, 3, 6, 12)]
    assert errors.length_groups(sources) == {
        '2 to 2 words': [1, 4], '3 to 5 words': [5, 2], '6 to 7 words': [6, 3], '9 to 12 words': [0, 7]}
    assert errors.length_groups(sources, n_groups=2) == {'2 to 5 words': [1, 4, 5, 2], '6 to 12 words': [6, 3, 0, 7]}


def test_sentences_are_grouped_by_rare_words_names_and_numbers():
    train_counts = Counter({'a': 900, 'dog': 90, 'runs': 5, 'in': 70, 'boston': 4, 'terrier': 4})
    sources = ['A dog runs', 'A dog runs in Boston', 'A Terrier runs in Boston', 'A dog 7', 'A terrier', 'A dog Y']
    found = errors.hard_groups(sources, train_counts)
    assert found['rare source words'] == {'no rare word': [0], '1 rare word': [1, 3, 4, 5], '2 or more': [2]}
    assert found['names and numbers'] == {'neither': [0, 4, 5], 'a name': [1, 2], 'a number': [3]}
    assert found['source length'] == errors.length_groups(sources)
    assert errors.names_of('A DOG RUNS') == []
    both = errors.hard_groups(['A dog 7 in Boston', 'a dog runs'], train_counts)
    assert both['names and numbers'] == {'neither': [1], 'a name': [0], 'a number': [0]} # groups may overlap


def test_bleu_of_a_group_is_the_mean_of_the_seeds_on_its_sentences(corpus):
    sources = [src for src, _ in corpus['val']]
    references = [tgt for _, tgt in corpus['val']]
    seeds = [references, [text.replace('die', 'der') for text in references]]
    counts = [record.bleu_counts(translations, references) for translations in seeds]
    members = [0, 3, 4, 7, 11]
    found = errors.group_scores(members, sources, counts)
    expected = [score([translations[i] for i in members], [references[i] for i in members]).bleu for translations in seeds]
    assert expected[1] < expected[0] == pytest.approx(100)
    assert found['bleu'] == pytest.approx(statistics.mean(expected))
    assert found['sentences'] == 5
    assert found['mean_words'] == statistics.mean(len(sources[i].split()) for i in members)
    assert found['low'] <= found['bleu'] <= found['high'] and found['low'] < found['high']


def test_recall_is_by_frequency_in_the_training_text():
    train_counts = Counter({'der': 900, 'und': 150, 'hund': 30, 'läuft': 5, 'katze': 2})
    references = ['Der Hund läuft und', 'Katze Katze unbekannt']
    found = errors.recall([['Der Hund läuft', 'eine Katze'], ['Der Hund und', 'eine katze Katze']], references, train_counts,
                          {'der'})
    assert found == {'0': {'words': 1, 'recall': 0}, '1': {'words': 2, 'recall': 3 / 4}, '5': {'words': 1, 'recall': 1 / 2},
                     '20': {'words': 1, 'recall': 1}, '100': {'words': 1, 'recall': 1 / 2}}


def test_candidate_with_the_highest_mean_utility_is_chosen():
    candidates = ['ein Hund läuft', 'ein Hund rennt', 'ein Hund rennt', 'eine Katze']
    utility = mbr.similarities(candidates, mbr.utilities(tokenized=False)['chrF'])
    assert set(utility) == {(a, b) for a in candidates for b in candidates}
    assert mbr.best(candidates, utility) == 'ein Hund rennt'
    assert mbr.best(candidates[:2], utility) == 'ein Hund läuft' # the first of two equals


def test_sentences_with_attention_are_chosen_by_length_and_chrf():
    "Neither side may be too short or too long, and the first of several is taken."
    sources = [' '.join('a' * n) for n in (7, 8, 12, 13, 9, 9, 9, 9)]
    translations = [' '.join('b' * n) for n in (8, 12, 8, 8, 7, 13, 10, 10)]
    chrf = [0.0, 90.0, 20.0, 100.0, 100.0, 0.0, 90.0, 20.0]
    assert caption_attention.choose(sources, translations, chrf) == {'good': 1, 'bad': 2}


@pytest.mark.parametrize('recorded', [True, False])
def test_attention_is_stored_for_recorded_translations_only(tmp_path, monkeypatch, capsys, recorded):
    "The weights are those of `Translator.attention`; a translation that has changed stops the script."
    translator = Translator.load()
    sources = ['The small dog eats the apple , and I sleep .', 'The small dog eats the apple , and you sleep .']
    translations = [translator.translate(text) for text in sources]
    (tmp_path / 'multi30k-tok').mkdir()
    for split, lang, lines in [('train', 'en', sources), ('test_2016_flickr', 'en', sources),
                               ('test_2016_flickr', 'de', [translations[0], 'etwas anderes'])]:
        with gzip.open(tmp_path / f'multi30k-tok/{split}.lc.norm.tok.{lang}.gz', 'wt', encoding='utf-8') as file:
            file.writelines(line + '\n' for line in lines)
    monkeypatch.setattr(caption_attention, 'RESULTS', tmp_path)
    monkeypatch.setattr(caption_attention, 'WORDS', range(30))
    weights = checksum(SHIPPED / 'model.safetensors')['sha256']
    (tmp_path / 'm.json').write_text(json.dumps({'weights_sha256': weights, 'search': {'beam_size': 4}}), 'utf-8')
    kept = translations if recorded else [translations[0], 'Nein .']
    (tmp_path / 'm.test.txt').write_text(''.join(line + '\n' for line in kept), 'utf-8')
    options = ['--model', SHIPPED, '--record', 'm', '--data-dir', tmp_path, '--out', tmp_path]
    monkeypatch.setattr(sys, 'argv', ['caption_attention.py', *map(str, options)])
    if not recorded:
        with pytest.raises(SystemExit):
            caption_attention.main()
        assert 'line 2 of the test set is not translated as in m.test.txt' in capsys.readouterr().err
        assert not (tmp_path / 'caption-attention.json').exists()
        return
    caption_attention.main()
    found = json.loads((tmp_path / 'caption-attention.json').read_text('utf-8'))
    assert str(tmp_path) not in json.dumps(found) and str(SHIPPED) not in json.dumps(found)
    for i, kind in enumerate(('good', 'bad')):
        pair = found['sentences'][kind]
        maps = translator.attention(sources[i], translations[i])
        assert (pair['line'], pair['source'], pair['translation']) == (i + 1, sources[i], translations[i])
        assert pair['source_tokens'] == maps.src and pair['predicted_tokens'] == [*maps.tgt[1:], '<eos>']
        assert np.allclose(pair['weights'], maps.cross[-1].mean(0), atol=0.0006)
        assert pair['in_training']['dog'] == 2 and pair['in_training']['sleep'] == 2


def test_record_on_attention_fits_its_model_and_page_10():
    found = load_result('caption-attention')
    model = load_result(found['model'])
    assert found['weights_sha256'] == model['weights_sha256'] and found['search'] == model['search']
    assert found['rule'] == caption_attention.RULE and caption_attention.WORDS == range(8, 13)
    translations = (record.RESULTS / f"{found['model']}.test.txt").read_text('utf-8').splitlines()
    path = record.RESULTS.parents[1] / 'nbs/10_english_to_german.ipynb'
    text = ' '.join(' '.join(''.join(cell['source']) for cell in json.loads(path.read_text('utf-8'))['cells']).split())
    for kind, pair in found['sentences'].items():
        assert pair['translation'] == translations[pair['line'] - 1]
        assert all(len(pair[side].split()) in caption_attention.WORDS for side in ('source', 'translation'))
        assert pair['chrf'] == round(CHRF().sentence_score(pair['translation'], [pair['reference']]).score, 2)
        for side in ('source', 'predicted'):
            spelled = ''.join(pair[f'{side}_tokens']).replace('▁', ' ').replace('<eos>', '').strip()
            assert re.sub(' +', ' ', spelled) == pair['source' if side == 'source' else 'translation']
        weights = np.array(pair['weights'])
        assert weights.shape == (len(pair['predicted_tokens']), len(pair['source_tokens']))
        assert np.abs(weights.sum(1) - 1).max() < 0.01 and weights.min() >= 0
        assert f'{weights.max(1).mean():.2f} in the {kind} ' in text
        lines = [kind, pair['source'], pair['translation'], pair['reference'] + ' (reference)']
        assert '\n'.join(lines) in shown_text('10_english_to_german')
    good, bad = found['sentences']['good'], found['sentences']['bad']
    assert good['chrf'] == 100 and bad['in_training']['spelunker'] == 0 and bad['in_training']['trek'] == 1
    row = bad['weights'][bad['predicted_tokens'].index('▁baum')]
    assert bad['source_tokens'][int(np.argmax(row))] == '▁tre'


def write_tokenized_multi30k(folder, references):
    (folder / 'multi30k-tok').mkdir()
    for name in ('val', 'test_2016_flickr'):
        for lang in ('en', 'de'):
            with gzip.open(folder / 'multi30k-tok' / f'{name}.lc.norm.tok.{lang}.gz', 'wt', encoding='utf-8') as file:
                file.writelines(f'{text} {name}\n' if lang == 'en' else text + '\n' for text in references)


def test_minimum_risk_on_tokenized_text(tmp_path, monkeypatch, corpus):
    """Scores and paired tests take the tokens as they are: `z.b.` is one, which sacreBLEU's own rules split.

    A translator that draws the reference most of the time takes the place of the model.
    """
    references = [f'ein hund läuft z.b. im garten nummer {i} .' for i in range(40)]
    write_tokenized_multi30k(tmp_path, references)
    bad = [text.replace('z.b.', 'u.a.') for text in references]
    (tmp_path / 'm.test.txt').write_text(''.join(text + '\n' for text in bad), 'utf-8')
    (tmp_path / 'model.safetensors').write_bytes(b'weights')
    weights = checksum(tmp_path / 'model.safetensors')['sha256']
    (tmp_path / 'm.json').write_text(json.dumps({'weights_sha256': weights, 'search': {'beam_size': 5}}), 'utf-8')

    def translate(sources, **search):
        return [source.rsplit(' ', 1)[0] for source in sources]

    def sample(sources, **settings):
        return ['ein kind' if i % 4 == 0 else text for i, text in enumerate(translate(sources))]
    loaded = SimpleNamespace(translate=translate, sample=sample)
    monkeypatch.setattr(mbr.Translator, 'load', lambda folder, engine: loaded)
    monkeypatch.setitem(sys.modules, 'ctranslate2', SimpleNamespace(set_random_seed=lambda seed: None))
    monkeypatch.setattr(mbr, 'RESULTS', tmp_path)
    options = ['--model', tmp_path, '--record', 'm', '--data-dir', tmp_path, '--out', tmp_path]
    monkeypatch.setattr(sys, 'argv', ['mbr.py', *map(str, options), '--tokenized', '--split', 'test'])
    mbr.main()

    found = json.loads((tmp_path / 'mbr.json').read_text('utf-8'))
    assert 'tok:none' in found['bleu_signature'] and found['sentences'] == 40
    assert str(tmp_path) not in json.dumps(found)
    of_beam = record.report_tokenized(bad, references)
    assert found['test']['beam search']['bleu'] == round(of_beam['lowercased_tokenized_bleu'], 2)
    assert found['test']['beam search']['bleu'] != round(score(bad, references).bleu, 2)
    assert found['test']['beam search']['chrf'] == round(of_beam['lowercased_tokenized_chrf'], 2)
    for utility in ('chrF', 'BLEU'):
        kept = (tmp_path / f'mbr-{utility.lower()}.test.txt').read_text('utf-8').splitlines()
        assert kept == references and found['test'][utility]['bleu'] == 100
        test = found['test'][utility]['paired_test']
        assert test['difference'] == pytest.approx(100 - of_beam['lowercased_tokenized_bleu'])
        assert test['chrf']['difference'] == pytest.approx(100 - of_beam['lowercased_tokenized_chrf'])
        assert test['p_value'] < 0.01


def test_record_on_minimum_risk_has_the_scores_of_its_translations():
    found = json.loads((record.RESULTS / 'mbr.json').read_text('utf-8'))
    model = json.loads((record.RESULTS / f"{found['model']}.json").read_text('utf-8'))
    assert found['weights_sha256'] == model['weights_sha256'] and found['search'] == model['search']
    assert found['bleu_signature'] == model['scores']['test']['lowercased_tokenized_signature']
    beam = found['test']['beam search']
    assert beam['bleu'] == model['metrics']['test_lowercased_tokenized_bleu']
    assert beam['chrf'] == model['metrics']['test_lowercased_tokenized_chrf']
    for utility in ('chrF', 'BLEU'):
        translations = (record.RESULTS / f'mbr-{utility.lower()}.test.txt').read_text('utf-8').splitlines()
        assert len(translations) == found['sentences'] == model['scores']['test']['sentences']
        scores = found['test'][utility]
        tested = scores['paired_test']
        assert tested['difference'] == pytest.approx(scores['bleu'] - beam['bleu'], abs=0.011)
        assert tested['chrf']['difference'] == pytest.approx(scores['chrf'] - beam['chrf'], abs=0.011)
    by_chrf, by_bleu = (found['test'][utility]['paired_test'] for utility in ('chrF', 'BLEU')) # as page 46 says
    assert by_chrf['chrf']['low'] > 0 and by_chrf['low'] < 0 < by_chrf['high'] and by_bleu['low'] < 0 < by_bleu['high']


def test_paired_comparison_of_settings():
    rng = np.random.default_rng(0)
    references = [' '.join(rng.choice(list('abcdefgh'), 12)) for _ in range(60)]
    def counts(n_words):
        translations = [' '.join(line.split()[:n_words]) + ' z' * (12 - n_words) for line in references]
        return np.array([record.bleu_counts(translations, references)] * len(paired.SEEDS))
    good, bad = counts(11), counts(9)
    found = paired.compare(good, bad, samples=1000)
    assert found['difference'] == pytest.approx(paired.mean_bleu(good) - paired.mean_bleu(bad)) and found['low'] > 0
    assert found['p_value'] == pytest.approx(1 / 1001)
    same = paired.compare(good, good, samples=1000)
    assert same['difference'] == 0 and same['p_value'] == 1


def test_stored_counts_of_sentences_give_the_bleu_of_the_record():
    found = json.loads((paired.RESULTS / 'paired.json').read_text())
    for name, setting in found['settings'].items():
        for seed, bleu in zip(paired.SEEDS, setting['bleu'], strict=True):
            counts = np.loadtxt(paired.RESULTS / f'{name}-seed{seed}.test.counts.txt', dtype=int)
            assert len(counts) == found['sentences'] and counts[:, 5].sum() == found['reference_tokens']
            ngrams = np.maximum(counts[:, 4:5] - np.arange(4), 0)
            assert record.bleu_of(np.hstack([counts[:, :4], ngrams, counts[:, 4:]])) == pytest.approx(bleu)


def test_counts_of_sentences_are_written_and_read_again(tmp_path, monkeypatch, corpus):
    references = [tgt for _, tgt in corpus['val']]
    counts = record.bleu_counts([text.replace('die', 'der') for text in references], references)
    monkeypatch.setattr(paired, 'RESULTS', tmp_path)
    paired.write_counts('few', np.array([counts] * len(paired.SEEDS)))
    stored = np.loadtxt(tmp_path / f'few-seed{paired.SEEDS[-1]}.test.counts.txt', dtype=int)
    assert (stored == counts[:, [0, 1, 2, 3, -2, -1]]).all()


def test_character_counts_give_the_chrf_of_sacrebleu(corpus):
    references = [tgt for _, tgt in corpus['val']]
    translations = [text.replace('die', 'der').removesuffix('.') for text in references]
    counts = paired.chrf_counts(translations, references)
    found, precision, recall = paired.chrf_parts(counts)
    assert found == pytest.approx(score(translations, references).chrf)
    assert recall < found < precision < 100
    same = paired.compare(*[np.array([counts] * len(paired.SEEDS))] * 2, paired.mean_chrf, samples=1000)
    assert same['difference'] == 0 and same['p_value'] == 1


def test_added_arms_leave_the_measured_ones_alone(monkeypatch):
    translator = Translator.load(device='cpu')
    monkeypatch.setattr(head_orders, 'toy_ende', lambda split, n: toy_ende(split, n=min(n, 4)))
    removed = []
    def keep(model, steps, heads, penalty, seed):
        assert heads == [], 'the gates were trained again'
        removed.append(24 - len(head_orders.heads_of(model)))
        return model.eval()
    monkeypatch.setattr(head_orders, 'tune_gates', keep)
    args = SimpleNamespace(pairs=4, sentences=4, seeds=1, penalties=[0.1], max_tokens=512, steps=1)
    kept = {'encoder.layers.1.self_attention': [1], 'decoder.layers.0.cross_attention': []} # 7 heads are closed
    earlier = {'seed': 1, 'penalty': 0.1, 'kept': 17, 'learned': 0.9, 'kept_heads': kept, 'by_gates_trained': 0.8,
               'by_gradient_trained': 0.7, 'random_trained': 0.6, 'by_gradient': 0.5}
    (row,) = head_orders.measure_gates(translator, args, [dict(earlier)])
    assert removed == [7] # one model was trained: without the heads that zero ablation chooses
    assert row == earlier | {'by_ablation_trained': row['by_ablation_trained']}
    del earlier['by_gates_trained']
    removed.clear()
    head_orders.measure_gates(translator, args, [dict(earlier)])
    assert removed == [7, 7]


def test_adversaries_start_from_the_model_itself():
    translator = Translator.load(device='cpu')
    pairs = toy_ende('test', n=4)
    ids = encode_pairs([(pair.src, pair.tgt) for pair in pairs], translator.tokenizer, translator.tokenizer.langs)
    batch = collate(ids)
    with torch.no_grad():
        old = attention_adversaries.run(translator.model, batch)
        assert torch.allclose(old[1], translator.model(batch.src, batch.tgt_in).log_softmax(-1), atol=1e-5)
        assert all(part.abs().max() == 0 for part in attention_adversaries.movement(batch, old, old))
        uniform = attention_adversaries.run(translator.model, batch, lambda weights: weights * 0 + 1 / weights.size(-1))
        of_weights, of_output, kl = attention_adversaries.movement(batch, old, uniform)
    assert of_weights.shape == (4, 4) and (of_weights > 0.1).all() and (of_output > 0).all() and (kl > 0).all()
    best = attention_adversaries.alignment_error(pairs, translator, old[0])
    assert best < 0.3 < attention_adversaries.alignment_error(pairs, translator, old[0].flip(-1))


# --- the recurrent baseline

def test_every_model_of_the_recurrent_comparison_is_tuned_equally():
    found = json.loads((record.RESULTS / 'recurrent.json').read_text('utf-8'))
    losses = found['sweep']['val_loss']
    assert list(losses) == list(recurrent.RATES) == list(found['toy-ende']['models'])
    for name, by_rate in losses.items():
        rates = [float(rate) for rate in by_rate]
        assert rates == list(recurrent.RATES[name]) and len(rates) == 5
        best = min(by_rate, key=by_rate.get)
        assert best not in (min(by_rate, key=float), max(by_rate, key=float)), f'{name}: the best rate is at the edge'
        assert found['toy-ende']['models'][name]['peak_lr'] == float(best)
    assert Counter((run['model'], run['seed']) for run in found['toy-ende']['runs']) == Counter(
        (name, seed) for name in losses for seed in range(12, 17))


def test_source_lengths_of_the_recurrent_comparison():
    names = [recurrent.length_group(' '.join(['a'] * n)) for n in (1, 7, 8, 15, 16, 23, 24, 40)]
    assert names == ['1-7', '1-7', '8-11', '12-15', '16-19', '20-23', '24+', '24+']


def test_the_recurrent_record_keeps_its_other_parts(tmp_path):
    path = tmp_path / 'recurrent.json'
    curve = [{'step': 1, 'val_loss': 2.5}, {'step': 2, 'val_loss': 1.5}]
    recurrent.join(path, sweep={'steps': 200})
    recurrent.join(path, multi30k={'runs': [{'curve': curve, 'weights': [[0.5, 0.5]], 'text': '{"a": [1]}'}]})
    assert recurrent.join(path) == json.loads(path.read_text('utf-8')) == {
        'name': 'recurrent', 'sweep': {'steps': 200},
        'multi30k': {'runs': [{'curve': curve, 'weights': [[0.5, 0.5]], 'text': '{"a": [1]}'}]}}
    assert '{ "step": 1, "val_loss": 2.5 }' in path.read_text('utf-8')


def test_site_figures_are_medians():
    def report(score, paint):
        return {'categories': {name: {'score': score} for name in site_speed.CATEGORIES},
                'audits': {audit: {'numericValue': paint} for audit, _ in site_speed.AUDITS.values()}}
    runs = [site_speed.figures(report(score, paint)) for score, paint in [(0.82, 1500), (0.98, 900), (0.955, 1200)]]
    assert runs[0]['performance'] == 82 and runs[0]['first_paint_s'] == 1.5 and runs[0]['blocking_ms'] == 1500
    row = site_speed.medians(runs)
    assert row['performance'] == 96 and row['largest_paint_s'] == 1.2 and row['best_practices'] == 96
    assert row['performance_of_runs'] == [82, 98, 96]


def test_site_is_served_compressed(tmp_path, monkeypatch):
    (tmp_path / 'index.html').write_text('<p>' + 'word ' * 500)
    (tmp_path / 'picture.png').write_bytes(b'x' * 500)
    monkeypatch.setattr(site_speed, 'SITE', tmp_path)
    address = site_speed.serve()
    with urlopen(f'{address}/index.html') as answer:
        assert answer.headers['Content-Encoding'] == 'gzip'
        data = answer.read()
    assert len(data) < 100 and gzip.decompress(data) == (tmp_path / 'index.html').read_bytes()
    with urlopen(f'{address}/picture.png') as answer:
        assert 'Content-Encoding' not in answer.headers and answer.read() == b'x' * 500
    with pytest.raises(HTTPError):
        urlopen(f'{address}/none.html')


def small_models():
    "An LSTM and a Transformer in eval mode."
    torch.manual_seed(0)
    lstm = build_model(RecurrentConfig(12, n_layers=2, d_model=8))
    transformer = build_model(RelativeConfig(12, n_layers=1, d_model=8, d_ff=8, n_heads=2, max_len=16))
    return {'LSTM': lstm.eval(), 'Transformer': transformer.eval()}


@pytest.mark.parametrize('kind', ['LSTM', 'Transformer'])
def test_gradients_by_distance_are_those_of_single_outputs(kind):
    model = small_models()[kind]
    ids = [4, 5, 6, 7, 8]
    vectors = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    embedded = []

    def keep(module, args, output):
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = model.src_embed.register_forward_hook(keep)
    squares = {0: [], 1: [], 2: []}
    for i in range(5):
        output = recurrent.encoder_output(model, torch.tensor([ids]))
        gradient, = torch.autograd.grad((output[0, i] * vectors[i]).sum(), embedded[-1])
        for j in range(5):
            squares.get(abs(i - j), []).append(gradient[0, j].square().sum().item())
    handle.remove()
    expected = [(sum(found) / len(found)) ** 0.5 for found in squares.values()]
    assert recurrent.gradients_by_distance(model, [ids], 3) == pytest.approx(expected, rel=1e-4)


def test_forget_gates_are_those_of_a_cell():
    model = small_models()['LSTM']
    lstm = model.encoder.lstm
    x = model.embed(torch.tensor([[4, 5, 6]]), model.src_embed)[0]
    hidden, gates = torch.zeros(4), []
    cell = torch.zeros(4)
    for token in x:
        parts = lstm.weight_ih_l0 @ token + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ hidden + lstm.bias_hh_l0
        write, forget, candidate, read = parts.chunk(4)
        gates.append(forget.sigmoid())
        cell = gates[-1] * cell + write.sigmoid() * candidate.tanh()
        hidden = read.sigmoid() * cell.tanh()
    torch.testing.assert_close(recurrent.forget_gates(model, [[4, 5, 6]]), torch.stack(gates))


def test_gradients_of_the_recurrent_record():
    "Each model is measured before and after training with the same seeds."
    found = json.loads((record.RESULTS / 'recurrent.json').read_text('utf-8'))['gradients']
    seeds = {name: [run['seed'] for run in found['runs'] if run['model'] == name] for name in recurrent.PATH_MODELS}
    assert len({tuple(found) for found in seeds.values()}) == 1 and set(seeds[recurrent.ADDITIVE]) <= {*recurrent.SEEDS}
    assert found['steps'] == recurrent.PATH_STEPS and found['sentences'] == recurrent.N_PATH_SENTENCES
    for run in found['runs']:
        assert len(run['before']['norms']) == len(run['after']['norms']) == recurrent.N_DISTANCES


def test_all_of_the_recurrent_comparison_is_one_command(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(sys, 'argv', ['recurrent.py', '--all', '--out', str(tmp_path / 'recurrent.json')])
    monkeypatch.setattr(recurrent, 'Task', lambda *args: SimpleNamespace(models={'LSTM, additive': None}))
    monkeypatch.setattr(recurrent, 'sweep', lambda task, steps, out, models: recurrent.join(
        out, sweep={'val_loss': {'LSTM, additive': {'0.01': 2.0, '0.02': 1.0}}}))
    monkeypatch.setattr(recurrent, 'compare', lambda task, rates, args: done.append((rates, args.seeds, args.minutes)))
    monkeypatch.setattr(recurrent, 'trained_paths', lambda task, out: done.append('gradients'))
    recurrent.main()
    assert done == [({'LSTM, additive': 0.02, recurrent.GENERAL: recurrent.GENERAL_RATE}, recurrent.SEEDS, 1.2),
                    'gradients']


# --- a reader's own experiment

def test_long_runs_of_page_47_are_kept_as_they_finish(tmp_path, monkeypatch):
    page = tmp_path / 'page.ipynb'
    sources = ["import sys\nif 'google.colab' in sys.modules: 1 / 0", '%load_ext jaxtyping\nrecorded = {}',
               "recorded['loss'] = 0.123456789\nrecorded['pilot'] = [[1.0000001]]", "raise SystemExit('stopped')"]
    page.write_text(json.dumps({'cells': [{'cell_type': 'code', 'source': source} for source in sources]}))
    monkeypatch.setattr(own_experiment, 'RECORD', tmp_path / 'record.json')
    with pytest.raises(SystemExit, match='stopped'):
        own_experiment.run_page(own_experiment.code_of(page))
    found = json.loads((tmp_path / 'record.json').read_text())
    assert found['values'] == {'loss': 0.12346, 'pilot': [[1.0]]} and found['machine'] and found['command']


def test_what_page_47_stores_is_saved(tmp_path, monkeypatch):
    sources = ['recorded = {}', 'def stored(key, make): return make()', "losses = [stored('seed 0', lambda: 2.0)] * 2",
               "assert stored('seed 0', None) == 2.0"]
    monkeypatch.setattr(own_experiment, 'RECORD', tmp_path / 'record.json')
    own_experiment.run_page(sources)
    assert json.loads((tmp_path / 'record.json').read_text())['values'] == {'seed 0': 2.0}


@pytest.fixture
def page_47():
    "What page 47 imports and defines, and its data: no run."
    data = ('config', 'texts', 'ids', 'pairs', 'val_pairs', 'test_pairs', 'peak_lrs', 'pilot_seeds')
    namespace = {'__name__': '__main__'}
    for number, source in enumerate(own_experiment.code_of(own_experiment.PAGE)):
        name = own_experiment.compile_cell(source, number).co_filename
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef))
                     or isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in data]
        exec(compile(tree, name, 'exec'), namespace)
    return namespace


def test_record_of_page_47_is_that_of_its_code(page_47):
    fingerprint, run = page_47['fingerprint'], page_47['run']
    expected = {f'more training {fingerprint(page_47["losses_with_more_training"])}'}
    for name in None, 'use_rms_norm', 'use_gelu', 'drop_norm_bias', 'use_attention_plus_one':
        change = page_47[name] if name else None
        expected.add(f'{name or "baseline"} {fingerprint(run, change)}')
        expected.add(f'{name or "baseline"} {fingerprint(page_47["pilot_losses"], change)}')
    for change in None, page_47['use_gelu']:
        expected.add(f'three epochs {fingerprint(page_47["three_epochs"], change)}')
    values = json.loads(own_experiment.RECORD.read_text('utf-8'))['values']
    assert {key.split(',')[0] for key in values} == expected


@pytest.mark.parametrize('edit', [
    'def use_gelu(model):\n    return gelu_feed_forward\n', 'def gelu_feed_forward(feed_forward, x):\n    return x\n',
    'def run(change, peak_lr, seed, batches, n_pairs=3000):\n    return 0.0\n', 'config = config, 1\n',
    'pairs = pairs[1:]\n', 'test_pairs = val_pairs\n'], ids=lambda edit: edit.split('(')[0].split(' =')[0])
def test_other_code_gets_no_recorded_run_on_page_47(page_47, edit):
    def now(): return page_47['fingerprint'](page_47['run'], page_47['use_gelu'])
    before = now()
    assert now() == before
    exec(own_experiment.compile_cell(edit, 'edited'), page_47)
    assert now() != before


def test_page_47_makes_again_what_is_not_in_its_record(page_47):
    "A value that a change reads from elsewhere is not in its hash: so the page keeps none of a reader's runs."
    page_47['recorded'] = {'a': 1}
    assert page_47['stored']('a', lambda: 2) == 1
    assert [page_47['stored']('b', lambda i=i: i) for i in range(2)] == [0, 1]


def test_every_record_names_the_instructions_of_the_processor(monkeypatch):
    lines = 'model name\t: A processor\nflags\t\t: fpu sse4_1 avx2 avx512_bf16 amx_bf16 fma\nmodel name\t: B\nflags\t\t: avx\n'
    monkeypatch.setattr(record.Path, 'read_text', lambda path: lines)
    found = record.about()
    assert found['cpu_flags'] == ['sse4_1', 'avx2', 'avx512_bf16', 'amx_bf16', 'fma']
    assert found['machine'].startswith('A processor, ')


# --- engines.py

def test_engines_are_compared_on_a_test_set():
    "In small: float32 agrees with PyTorch in every sentence, with either stopping rule; each system has its scores."
    pytest.importorskip('ctranslate2')
    pairs = [(pair.src, pair.tgt) for pair in toy_ende('test_long', n=12)]
    found = engines.compare(SHIPPED, pairs)
    assert list(found) == list(engines.SYSTEMS)
    assert found['CTranslate2 float32']['same'] == 12
    for name in ('PyTorch, patience 1', 'CTranslate2 float32, patience 1'):
        assert found[name]['same_as_pytorch_with_this_patience']['same'] == 12
    for row in found.values():
        assert 0 < row['bleu'] <= 100 and row['same'] + sum(row['kinds'].values()) == 12


def test_translations_that_differ_are_sorted_by_their_score():
    translator = Translator.load(device='cpu')
    rows = translator.encode([pair.src for pair in toy_ende('test', n=4)])
    config = translator.decoding
    ours = engines.translate(translator, rows, config)
    for row, best in zip(rows, ours):
        assert abs(engines.rescore(translator, row, best.ids, config) - best.normalized_score) < 1e-4
    worse = [SimpleNamespace(ids=best.ids[:-2]) for best in ours]
    counts = {'tie': 0, 'lower score': 0, 'higher score': 0}
    found = engines.differences(translator, rows, ours, [ours[0], *worse[1:]], config)
    assert found['same'] == 1 and found['kinds'] == counts | {'lower score': 3} and found['largest_score_gap'] > 1
    found = engines.differences(translator, rows, worse, [worse[0], *ours[1:]], config)
    assert found['kinds'] == counts | {'higher score': 3}


ROOT = Path(__file__).parents[1]


def page_about_engines():
    "Its prose, on one line."
    page = json.loads((ROOT / 'nbs/63_engines.ipynb').read_text())
    text = ' '.join(''.join(cell['source']) for cell in page['cells'] if cell['cell_type'] == 'markdown')
    return ' '.join(text.split())


def test_page_about_engines_says_what_the_record_says():
    found = json.loads((ROOT / 'benchmarks/results/engines.json').read_text())
    metrics, n = found['metrics'], found['sentences']
    speeds = {}
    for name, row in metrics.items():
        for batch, sentences in (('1', found['single_sentences']), ('64', n)):
            assert len(row['seconds'][batch]) == found['rounds'] == 7
            speeds[name, batch] = sentences / statistics.median(row['seconds'][batch])
    pytorch, float32, int8, early_pytorch, early, both = [
        [speeds[name, batch] for batch in ('1', '64')]
        for name in ('PyTorch', 'CTranslate2 float32', 'CTranslate2 int8', 'PyTorch, patience 1', 'CTranslate2 float32, patience 1',
                     'CTranslate2 int8, patience 1')]

    def gains(fast, slow):
        return ', '.join(f'{a / b:.1f}' for a, b in zip(fast, slow))
    in_batches = [metrics[f'CTranslate2 {kind}, patience 1']['seconds']['64'] for kind in ('int8', 'float32')]
    assert max(in_batches[0]) > min(in_batches[1]) # the ranges overlap
    eight_bits, sooner = metrics['CTranslate2 int8'], metrics['CTranslate2 float32, patience 1']
    assert n == metrics['CTranslate2 float32']['same'] == 1000
    assert sooner['same_as_pytorch_with_this_patience']['same'] == 1000
    assert sooner['kinds'] == {'tie': 0, 'lower score': 1000 - sooner['same'], 'higher score': 0}
    lower, higher = eight_bits['kinds']['lower score'], eight_bits['kinds']['higher score']
    changed = 1000 - eight_bits['same']
    assert lower + higher == changed
    test = eight_bits['paired_test']
    for row in metrics.values(): # all intervals include 0
        if 'paired_test' in row:
            assert row['paired_test']['low'] < 0 < row['paired_test']['high'] and row['paired_test']['p_value'] > 0.05
    assert abs(sooner['paired_test']['difference']) < 0.05 # BLEU hardly changes
    assert (found['model']['vocab_size'], found['model']['n_layers'], found['model']['d_model']) == (10_000, 4, 128)
    assert 0.23 < changed / n < 0.28 and 'if a quarter of the translations may change' in page_about_engines()
    text = page_about_engines()
    for words in (
        f'single sentences {both[0] / pytorch[0]:.0f} times as fast as PyTorch with exact stopping, '
        f'and batches {both[1] / pytorch[1]:.0f} times',
        f'|PyTorch|{gains(float32, pytorch)}|{gains(early, early_pytorch)}|',
        f'|{1000 - sooner["same"]} of 1,000 may change|exact stopping|–|{gains(early, float32)}|',
        f'|{changed} of 1,000 may change|float32|{gains(int8, float32)}|{gains(both, early)}|',
        f"The {1000 - sooner['same']} that change with `patience=1` all have a lower score",
        f"It lowers BLEU by {-test['difference']:.2f}",
        f"does not exclude a loss of {-test['low']:.2f}",
        f'{lower} of the {changed} changed translations are worse, and {higher} are better',
    ):
        assert words in text, words


def test_page_about_engines_says_which_first_margin_is_fastest():
    found = json.loads((ROOT / 'benchmarks/results/engines.json').read_text())['margins']
    single, batches = [{margin: statistics.median(seconds[batch]) for margin, seconds in found['seconds'].items()}
                       for batch in ('1', '64')]
    text = page_about_engines()
    assert f"captions in batches, 6 takes {1 - batches['6'] / batches['3']:.0%} less time than 3." in text
    assert 'For single sentences, all ranges overlap (6 has the best median)' in text
    assert min(single, key=single.get) == '6'
    ranges = [(min(seconds['1']), max(seconds['1'])) for seconds in found['seconds'].values()]
    assert max(low for low, _ in ranges) < min(high for _, high in ranges)
    assert single['6'] < single['8'] and batches['8'] < batches['6']
    for batch in ('1', '64'):
        six, eight = [found['seconds'][margin][batch] for margin in ('6', '8')]
        assert min(six) < max(eight) and min(eight) < max(six)
    record = json.loads((ROOT / 'benchmarks/results/engines.json').read_text())
    of_table = record['sentences'] / statistics.median(record['metrics']['CTranslate2 float32']['seconds']['64'])
    assert f'measured at another time: {of_table:.0f} sentences per second' in text


def test_page_about_inference_says_what_the_record_says():
    found = json.loads((ROOT / 'benchmarks/results/inference.json').read_text())
    page = json.loads((ROOT / 'nbs/28_inference.ipynb').read_text())
    text = ' '.join(' '.join(''.join(c['source']) for c in page['cells'] if c['cell_type'] == 'markdown').split())
    without = found['without']
    one_greedy, one_beam, batch = found['settings']
    cache = without['key/value cache']
    projected = without['source projected once']
    milliseconds = found['milliseconds']
    for words in (
        f'takes {cache[one_greedy][1]:.1f} times as long for greedy search of one sentence, and '
        f'{cache[batch][1]:.1f} times as long for a batch of 64 (beam 4)',
        f'in the batch, which takes {cache[batch][1]:.1f} times as long without it',
        f'largely fixed costs, takes {cache[one_greedy][1]:.1f} times as long',
        f"stay**, the batch takes {without['finished sentences leave the batch'][batch][1]:.1f} times as long",
        f'greedy search takes {projected[one_greedy][1]:.1f} times and the batch {projected[batch][1]:.1f} times as long',
        f"the batch takes {without['k queries for each source'][batch][1]:.2f} times as long",
        f"even the control's median is {without['nothing (control)'][one_beam][1]:.2f}",
        f'64 sentences together are {milliseconds[one_beam] / milliseconds[batch]:.1f} times as fast as one at a time',
        f'{milliseconds[one_beam] / milliseconds[batch]:.1f} times the throughput of single sentences',
        f'beam 4 takes only {milliseconds[one_beam] / milliseconds[one_greedy]:.2f} times as long as greedy search',
    ):
        assert words in text, words
    threads = found['without_suitable_threads']
    busy = threads['with another program on one core']
    assert 4 < min(busy[one_greedy][1], busy[one_beam][1]) and 'more than four times as long without it' in text
    assert all(first < 1 for first, _, _ in threads['alone'].values()) # no effect on an idle machine
    effects = {(name, setting) for name, row in without.items() for setting, (first, _, _) in row.items() if first > 1}
    assert effects == {('key/value cache', one_greedy), ('key/value cache', batch),
                       ('source projected once', one_greedy), ('source projected once', batch),
                       ('k queries for each source', batch), ('finished sentences leave the batch', batch)}


def decode_speed_record(size, older=False):
    name = 'decode-speed' + '-avx512' * older + f'-{size}' * (size != 'toy')
    return json.loads((ROOT / f'benchmarks/results/{name}.json').read_text())


def row_of(size, older, batch, kind):
    "The measurement of an engine with a beam of 4: of PyTorch, or of CTranslate2 in a compute type."
    names = {'PyTorch': '', 'float32': ' with CTranslate2', 'int8': ' with CTranslate2 int8'}
    row, = [row for row in decode_speed_record(size, older)['metrics']
            if (row['engine'], row['beam'], row['batch'], row['unit'])
            == ('annotated_transformer' + names[kind], 4, batch, 'ids')]
    return row


def test_page_about_engines_states_the_speedups_of_the_records():
    "Of CTranslate2 relative to PyTorch, and of int8 relative to float32."
    def speed(*setting):
        row = row_of(*setting)
        return row['sentences'] / statistics.median(row['rounds'])

    sizes = ('toy', 'tiny', 'small', 'base')
    float32, int8 = {}, {} # relative to PyTorch, and to float32
    for older in (False, True):
        for batch in (1, 64):
            for size in sizes if older else sizes[:2]:
                float32[older, batch, size] = speed(size, older, batch, 'float32') / speed(size, older, batch, 'PyTorch')
                int8[older, batch, size] = speed(size, older, batch, 'int8') / speed(size, older, batch, 'float32')
    assert min(*float32.values(), *int8.values()) > 1 # int8 has the higher median at every size
    for older, batch in ((False, 1), (False, 64), (True, 1), (True, 64)):
        found = [float32[older, batch, size] for size in sizes if (older, batch, size) in float32]
        assert found == sorted(found, reverse=True) # the larger the model, the smaller the speedup
    assert [int8[True, 1, size] for size in sizes] == sorted(int8[True, 1, size] for size in sizes)
    # with one sentence, int8 gains more than in batches
    assert all(int8[older, 1, size] > int8[older, 64, size] for older, _, size in int8 if size != 'toy')
    assert row_of('base', True, 1, 'int8')['sentences'] == 6
    for size, batch, slow, fast in (('base', 1, 'PyTorch', 'float32'), ('small', 64, 'PyTorch', 'int8'), ('small', 64, 'float32', 'int8')):
        repetitions = [row_of(size, True, batch, kind)['rounds'] for kind in (slow, fast)]
        assert sum(a < b for a, b in zip(*repetitions)) == 1 # slower in one repetition: the range includes 1
    text = page_about_engines()
    for words in (
        f"falls from {float32[True, 1, 'tiny']:.1f} times (`tiny`) to {float32[True, 1, 'base']:.1f} with `base` (the paper's size; "
        'measured on only 6 sentences)',
        f"in batches, from {float32[True, 64, 'tiny']:.1f} to {float32[True, 64, 'base']:.1f}.",
        f"it is {int8[True, 1, 'toy']:.1f} (`toy`) to {int8[True, 1, 'base']:.1f} times (`base`) as fast as float32; in "
        f"batches, {int8[True, 64, 'tiny']:.1f} (`tiny`) to {int8[True, 64, 'base']:.1f}.",
    ):
        assert words in text, words


def test_module_engines_counts_where_workers_are_faster():
    n_faster = n_cells = 0
    for size in ('toy', 'tiny', 'small', 'base'):
        for older in (False, True):
            if not older and size in ('small', 'base'):
                continue
            record = decode_speed_record(size, older)
            for kind in ('float32', 'int8'):
                if kind == 'float32' and record['settings']['model']['d_model'] >= 256:
                    continue
                for beam in (1, 4):
                    seconds = {row['engine']: statistics.median(row['rounds']) for row in record['metrics']
                               if (row['beam'], row['batch'], row['unit']) == (beam, 64, 'ids')}
                    name = f'CTranslate2 {kind}'
                    if f'{name}, a worker for each thread' in seconds:
                        n_cells += 1
                        n_faster += seconds[f'{name}, a worker for each thread'] < seconds[name]
    module = (ROOT / 'annotated_transformer/engines.py').read_text()
    assert f'workers share a batch: faster in {n_faster} of {n_cells} measured cases' in module


# --- decode_speed.py and train_speed.py

def measured(script, out, *flags):
    "Run a benchmark in small; return its record."
    command = [sys.executable, Path(__file__).parents[1] / 'benchmarks' / script, '--out', out, '--rounds', '2', *flags]
    subprocess.run(command, check=True, timeout=600)
    return json.loads(out.read_text())


def test_decode_speed_measures_some_batch_sizes_again(tmp_path, monkeypatch):
    "The others stay as they are. Another machine or other settings are refused."
    import decode_speed
    args = argparse.Namespace(beams=[1, 4], batches=[1, 8, 64], sentences=20, single_sentences=5, cells=None, again=[])
    speeds = iter(range(100))

    def row_of(args, path, cell):
        return [{**cell, 'speed': next(speeds), 'measured': 'now'}]

    monkeypatch.setattr(decode_speed, 'measure_cell', row_of)
    out = tmp_path / 'decode.json'
    same = {'settings': {'rounds': 5}, 'weights_sha256': 'a', 'cpu_model': 'b', 'cpu_flags': ['c'], 'versions': {}}
    first = {**same, 'command': 'first', 'date': 'yesterday', 'metrics': []}
    decode_speed.measure(args, tmp_path, first, out)
    old = json.loads(out.read_text())
    for row in old['metrics']:
        del row['measured'] # as in records from before
    again = {**same, 'command': 'second', 'date': 'today', 'metrics': []}
    args.again = [64]
    decode_speed.continue_record(again, old, args.again)
    decode_speed.measure(args, tmp_path, again, out)
    new = json.loads(out.read_text())
    assert [(row['beam'], row['batch'], row['speed'], row['measured']) for row in new['metrics']] == [
        (1, 1, 0, 'yesterday'), (1, 8, 1, 'yesterday'), (1, 64, 6, 'now'),
        (4, 1, 3, 'yesterday'), (4, 8, 4, 'yesterday'), (4, 64, 7, 'now')]
    assert (new['command'], new['date']) == ('first', 'yesterday')
    assert new['measured_again'] == [{'command': 'second', 'date': 'today'}]
    with pytest.raises(SystemExit, match='differs from this measurement in cpu_model'):
        decode_speed.continue_record({**again, 'cpu_model': 'another'}, new, [64])
    with pytest.raises(SystemExit, match='does not exist'):
        decode_speed.continue_record(again, {}, [64])
    other = {**again, 'settings': {'rounds': 1}, 'metrics': []}
    decode_speed.continue_record(other, new, [])
    assert other['metrics'] == []


def test_decode_speed_translates_texts_in_the_batches_of_their_ids(tmp_path, monkeypatch, capsys):
    import decode_speed
    seen = []

    def note(items, beam):
        seen.append(items)
        return [[] for _ in items]

    monkeypatch.setattr(decode_speed, 'make_engine', lambda *args: (note, note))
    rows = [[1] * n for n in (3, 7, 5, 1)]
    texts = ['a long text of few tokens', 'b', 'c', 'd'] # by characters, the order would be another
    prepared = tmp_path / 'prepared.json'
    prepared.write_text(json.dumps({'rows': rows, 'texts': texts}))
    cell = {'beam': 1, 'batch': 2, 'sentences': 4, 'warm_up': False}
    lines = [json.dumps({**cell, 'unit': unit}) + '\n' for unit in ('ids', 'text')]
    monkeypatch.setattr(sys, 'stdin', lines)
    decode_speed.work(argparse.Namespace(prepared=prepared, worker='name', thread_counts=[1], device='cpu'))
    assert seen == [[rows[1], rows[2]], [rows[0], rows[3]], [texts[1], texts[2]], [texts[0], texts[3]]]


def test_decode_speed_measures_half_precision_on_a_gpu(monkeypatch, capsys):
    import decode_speed
    monkeypatch.setattr(sys, 'argv', ['decode_speed.py', '--size', 'base', '--device', 'cuda'])
    args = decode_speed.arguments()
    assert set(decode_speed.ON_GPU) - set(args.engines) == {decode_speed.OURS_DEFAULT} # random weights never end
    assert args.thread_counts == [1]
    assert {decode_speed.number_format(name) for name in args.engines if 'CTranslate2' in name} == {'float16'}
    monkeypatch.setattr(sys, 'argv', ['decode_speed.py', '--engines', decode_speed.CTRANSLATE2_HALF])
    with pytest.raises(SystemExit):
        decode_speed.arguments()
    assert 'CTranslate2 float16 cannot be measured with --device cpu' in capsys.readouterr().err


def test_decode_speed_computes_in_the_number_format_of_the_name(monkeypatch):
    "An engine in float16 holds float16 weights, and on the shipped model, it finds the same ids as in float32."
    import torch
    from annotated_transformer.translator import SHIPPED, Translator
    import decode_speed
    loaded = []
    load = Translator.load

    def noted(*args, **kwargs):
        loaded.append(load(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(Translator, 'load', noted)
    monkeypatch.setattr(torch, 'set_num_threads', lambda n: None)
    prepared = {'model': str(SHIPPED), 'max_extra_tokens': 50}
    row = Translator.load(device='cpu').encode(['the old dog sleeps .'])
    found = [decode_speed.make_engine(name, prepared, 1, 'cpu')[0](row, 4)
             for name in (decode_speed.OURS, decode_speed.OURS_HALF)]
    assert found[0] == found[1] != [[]]
    assert [next(each.model.parameters()).dtype for each in loaded] == [torch.float32, torch.float32, torch.float16]


@pytest.mark.slow
def test_decode_speed_measures_every_engine(tmp_path):
    "All search alike, so in float32 all find the same translations. The same command again measures nothing."
    pytest.importorskip('ctranslate2')
    pytest.importorskip('transformers')
    import decode_speed
    flags = ['--sentences', '6', '--beams', '4', '--batches', '1', '--thread-counts', '1']
    found = measured('decode_speed.py', tmp_path / 'decode.json', *flags)
    engines_of = {unit: {row['engine'] for row in found['metrics'] if row['unit'] == unit} for unit in ('ids', 'text')}
    on_cpu = set(decode_speed.ENGINES) - set(decode_speed.WORKERS) # single sentences cannot be divided among workers
    assert engines_of == {'ids': on_cpu, 'text': on_cpu & set(decode_speed.TEXT_ENGINES)}
    for row in found['metrics']:
        assert row['slowest'] <= row['sentences_per_second'] <= row['fastest']
        assert 0 < row['latency_ms']['median'] <= row['latency_ms']['95 %']
        if 'int8' not in row['engine'] and 'can win' not in row['engine']:
            assert row['same_as_first'] == row['sentences'] == 5, row['engine']
    assert found['cpu_flags'] == record.cpu_flags()
    before = (tmp_path / 'decode.json').read_bytes()
    measured('decode_speed.py', tmp_path / 'decode.json', *flags)
    assert (tmp_path / 'decode.json').read_bytes() == before


def test_train_speed_times_a_matrix_product_several_times():
    rates = train_speed.matrix_rates('cpu', torch.float32, timings=3, repeats=2, n=64)
    assert len(rates) == 3 and min(rates) > 0


@pytest.mark.slow
def test_train_speed_measures_every_library(tmp_path):
    pytest.importorskip('transformers')
    import train_speed
    found = measured('train_speed.py', tmp_path / 'train.json', '--sizes', 'tiny', '--steps', '1', '--threads', '1')
    tiny = found['metrics']['tiny']
    assert set(tiny['rounds']) == set(tiny['tokens_per_second']) == {train_speed.OURS, *train_speed.OTHERS}
    assert all(len(rounds) == 2 for rounds in tiny['rounds'].values())
    assert tiny['fastest_other'] in train_speed.OTHERS and tiny['speedup_of_medians'] > 0 and tiny['speedup_of_best'] > 0
    assert found['cpu_flags'] == record.cpu_flags() and found['settings']['precision'] == 'float32'
    assert found['matrix_tflops'] == statistics.median(found['matrix_tflops_rounds']) and len(found['matrix_tflops_rounds']) == 7


# --- tables of the pages

def shown_tables(page):
    "The Markdown tables in a page's stored outputs: a list of rows for each, its header first; a row is a list of cells."
    path = Path(__file__).parents[1] / 'nbs' / f'{page}.ipynb'
    found = []
    for cell in json.loads(path.read_text('utf-8'))['cells']:
        for output in cell.get('outputs', []):
            text = ''.join(output.get('data', {}).get('text/markdown', ''))
            for block in re.findall(r'(?:^\|.*\n?)+', text, re.M):
                rows = [[part.strip() for part in line.strip('| ').split('|')] for line in block.splitlines()]
                found.append([row for row in rows if set(''.join(row)) - set('-')])
    return found


def shown_text(page):
    "All text in a page's stored outputs."
    path = Path(__file__).parents[1] / 'nbs' / f'{page}.ipynb'
    cells = json.loads(path.read_text('utf-8'))['cells']
    outputs = [output for cell in cells for output in cell.get('outputs', [])]
    return '\n'.join(''.join(each.get('text', each.get('data', {}).get('text/markdown', ''))) for each in outputs)


def load_result(name):
    return json.loads((record.RESULTS / f'{name}.json').read_text('utf-8'))


def test_full_runs_on_page_30_are_those_of_the_records():
    (rows,) = [table for table in shown_tables('30_recipes') if table[0][0] == 'pair']
    names = ['multi30k-en-de', 'multi30k-en-de-seed2', 'multi30k-en-de-seed3', 'multi30k-de-en', 'multi30k-en-fr']
    for row, name in zip(rows[1:], names, strict=True):
        scores = load_result(name)['scores']
        expected = [scores[split][metric] for split in ('val', 'test_2016_flickr') for metric in ('bleu', 'chrf')]
        assert row[4:8] == [f'{value:.1f}' for value in expected], name
    for signature in (scores['val']['signature'], scores['val']['chrf_signature']):
        assert signature in shown_text('30_recipes')


def page_30(folder):
    "What the cells of page 30 that compare settings show if `folder` holds its records."
    cells = json.loads((Path(__file__).parents[1] / 'nbs/30_recipes.ipynb').read_text('utf-8'))['cells']
    sources = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    first, last = (next(n for n, text in enumerate(sources) if part in text)
                   for part in ("record('recipe-paired')", 'def others('))
    setup = next(text for text in sources if 'RESULTS = ' in text)
    shown = []
    names = {'display': lambda each: shown.append(each.data), 'print': lambda *texts: shown.append(' '.join(texts))}
    exec('\n'.join(line for line in setup.splitlines() if not line.startswith('%')), names)
    names['RESULTS'] = folder
    for source in sources[first:last + 1]:
        *statements, final = ast.parse(source).body
        exec(compile(ast.Module(statements, []), 'page 30', 'exec'), names)
        if isinstance(final, ast.Expr):
            value = eval(compile(ast.Expression(final.value), 'page 30', 'eval'), names)
            if isinstance(value, names['Markdown']):
                shown.append(value.data)
        else:
            exec(compile(ast.Module([final], []), 'page 30', 'exec'), names)
    names['axes'][0].figure.clear()
    return '\n'.join(shown)


def made_up_sweep(variants):
    "A record of a sweep with random scores; the first change is worth 9 BLEU less, the second 9 chrF less."
    numbers = np.random.default_rng(len(variants))
    rows = {}
    for setting in (None, *variants):
        for run in recipe.run_names(setting) if setting else recipe.SEEDS:
            bleu, chrf = numbers.normal((31, 54), 0.3)
            rows[run] = {'val_bleu': bleu - 9 * (setting == variants[0]),
                         'val_chrf': chrf - 9 * (len(variants) > 1 and setting == variants[1]), 'steps': 1386}
    rows = {name: rows[name] for name in recipe.planned([], True) if name in rows}
    return {'epochs': 6, 'seeds': [1, 2, 3]} | recipe.comparison(rows)


SWEPT = ['dropout 0.1', 'vocabulary 4,000', 'R-Drop 5', 'post-norm', *list(recipe.VARIANTS)[3:12], 'sinusoidal positions']


@pytest.fixture(params=[1, 4, len(SWEPT), 'record'])
def sweep(request, tmp_path):
    "A record of a sweep, and what page 30 shows with it: three made-up ones, and the one at hand."
    if request.param == 'record':
        if not (record.RESULTS / 'recipe-paired.json').exists():
            pytest.skip('no record of the sweep yet')
        return load_result('recipe-paired'), shown_text('30_recipes')
    made_up = made_up_sweep(SWEPT[:request.param])
    (tmp_path / 'recipe-paired.json').write_text(json.dumps(made_up))
    shutil.copy(record.RESULTS / 'recipe.json', tmp_path)
    return made_up, page_30(tmp_path)


def signed(number):
    return f'{number:+.1f}'.replace('-', '−')


def test_page_30_says_first_which_changes_are_like_luck(sweep):
    swept, text = sweep
    found, _ = recipe.paired(swept['metrics']['variants'])
    assert found.keys() == swept['metrics']['paired'].keys()

    def apart(metric):
        return {name for name, row in found.items() if min(row[metric]['corrected']) > 0 or max(row[metric]['corrected']) < 0}

    def mean(name, metric='val_bleu'):
        return statistics.mean(found[name][metric]['differences'])

    def listed(names, with_differences=True):
        names = sorted(names, key=mean, reverse=True)
        return '; '.join(f"{name} ({signed(mean(name))} BLEU, {signed(mean(name, 'val_chrf'))} chrF)" if with_differences else name
                         for name in names) or 'none'

    bleu, chrf = apart('val_bleu'), apart('val_chrf')
    like_luck = found.keys() - bleu - chrf
    changes = f"{len(found)} change{'s' if len(found) > 1 else ''}"
    expected = [f'**{len(like_luck)} of {changes} cannot be told apart from luck after {swept["epochs"]} epochs, neither in BLEU '
                f'nor in chrF:** {listed(like_luck, False)}.', '',
                *(f'- Told apart in {title}: {listed(names)}.' for title, names in (
                    ('BLEU and chrF', bleu & chrf), ('BLEU only', bleu - chrf), ('chrF only', chrf - bleu)) if names)]
    start = text.index('**')
    shown = text[start:].splitlines()
    assert shown[:len(expected)] == expected and text.count('Told apart in') == len(expected) - 2
    if 'machine' not in swept: # made up
        assert 'dropout 0.1' in bleu - chrf and (len(found) == 1 or 'vocabulary 4,000' in chrf - bleu)


def test_calculation_on_page_30_is_that_of_the_record(sweep):
    swept, text = sweep
    settings = 1 + len(swept['metrics']['paired'])
    noise = swept['metrics']['noise']['val_bleu']
    assert noise['degrees_of_freedom'] == 2 * (settings - 1)
    scores_of_recipe = [swept['metrics']['variants'][name]['val_bleu'] for name in recipe.SEEDS]
    assert 'the recipe: ' + ', '.join(f'{score:.2f}' for score in scores_of_recipe) + ' BLEU' in text
    assert f"noise: s = {noise['spread']:.2f} BLEU, {noise['degrees_of_freedom']} degrees of freedom" in text
    for name, confidence in (('95% interval', 0.95), ('corrected interval', recipe.CORRECTED)):
        t = t_quantile(noise['degrees_of_freedom'], confidence)
        half_width = t * noise['spread'] * (2 / 3) ** 0.5
        assert f'{name}: difference ± {t:.2f} · s · √(2 / 3) = ± {half_width:.2f} BLEU' in text
    rows = swept['metrics']['variants']
    runs = [list(recipe.SEEDS), *map(recipe.run_names, swept['metrics']['paired'])]
    scores = np.array([[rows[run]['val_bleu'] for run in names] for names in runs])
    rest = scores - scores.mean(0) - scores.mean(1)[:, None] + scores.mean()
    spreads = ((rest ** 2).sum(1) * settings / noise['degrees_of_freedom']) ** 0.5
    unpaired = t_quantile(2 * settings) * statistics.mean(scores.var(1, ddof=1)) ** 0.5 * (2 / 3) ** 0.5
    assert f'95% interval without pairing: difference ± {unpaired:.2f} BLEU' in text
    if 'machine' in swept: # not made up: "the interval would even be narrower without it"
        low, high = next(iter(swept['metrics']['paired'].values()))['val_bleu']['interval']
        assert 2 * unpaired < high - low
    assert settings == 2 or (f"spread of one setting: {spreads.min():.2f} to {spreads.max():.2f} BLEU; "
                             f"the largest is {spreads.max() / noise['spread']:.1f} · s" in text)


def older_sweep():
    "The differences between the changes of the first sweep and its recipe, in BLEU and chrF, and their margins."
    runs = {name.replace('peak rate', 'peak learning rate'): row for name, row in load_result('recipe')['metrics']['variants'].items()}
    seeds = {metric: [row[metric] for name, row in runs.items() if name.startswith('the recipe')] for metric in recipe.METRICS}
    margins = {metric: t_quantile(2) * statistics.stdev(values) * (4 / 3) ** 0.5 for metric, values in seeds.items()}
    return {name: {metric: row[metric] - statistics.mean(seeds[metric]) for metric in recipe.METRICS}
            for name, row in runs.items() if not name.startswith('the recipe')}, margins


def test_page_30_says_what_the_older_sweep_can_tell(sweep):
    swept, text = sweep
    older, margins = older_sweep()
    inside = [name for name, row in older.items() if all(abs(row[metric]) <= margins[metric] for metric in margins)]
    assert f"± {margins['val_bleu']:.1f} BLEU or ± {margins['val_chrf']:.1f} chrF" in ' '.join(text.split())
    assert f'In both scores, {len(inside)} of the {len(older)} changes lie inside' in text and len(inside) == 8
    found = {name: statistics.mean(row['val_bleu']['differences']) for name, row in swept['metrics']['paired'].items()}
    shared = sorted((name for name in older if name in found), key=found.get, reverse=True)
    listed = '; '.join(f"{name} {signed(older[name]['val_bleu'])} BLEU" for name in shared)
    assert (f'After 12 epochs, the changes in the plot have these differences, from one run each: {listed or "none"}.'
            in ' '.join(text.split()))
    if 'machine' in swept: # not made up
        large = [name for name in shared if abs(found[name]) > 2]
        assert large == ['dropout 0.1', 'sinusoidal positions'] # "both large differences ... are smaller there"
        assert all(abs(older[name]['val_bleu']) < abs(found[name]) for name in large)


TABLE_30 = {'size': {'d_ff 512': 'd_ff 512', 'wide model (d_model 256)': 'wide model (d_model 256)'}, 'norm': {'post': 'post-norm'},
            'positions': {'sinusoidal': 'sinusoidal positions'},
            'vocabulary': {'4,000': 'vocabulary 4,000', '16,000': 'vocabulary 16,000'},
            'dropout': {'0.1': 'dropout 0.1', '0.2': 'dropout 0.2'},
            'tokens per batch': {'1,024': 'batches of 1,024 tokens', '4,096': 'batches of 4,096 tokens'},
            'peak learning rate': {'2e-3': 'peak learning rate 2e-3', '6e-3': 'peak learning rate 6e-3'},
            'warm-up': {'200': 'warm-up 200', '1,000': 'warm-up 1,000'}, 'label smoothing': {'no': 'no label smoothing'},
            'R-Drop': {'1': 'R-Drop 1', '5': 'R-Drop 5'}, 'BPE-dropout': {'0.1': 'BPE-dropout 0.1'},
            'final weights': {'moving average of weights': 'moving average of weights'}}


def test_settings_on_page_30_have_the_differences_of_the_records(sweep):
    swept, text = sweep
    older, _ = older_sweep()
    rows = {line.split(' | ')[0].strip('| '): line.split(' | ')[3].strip('| ') for line in text.splitlines() if line.startswith('| ')}
    for setting, values in TABLE_30.items():
        expected = []
        for value, name in values.items():
            assert name in recipe.VARIANTS
            if name in swept['metrics']['paired']:
                row = swept['metrics']['paired'][name]['val_bleu']
                mark = '' if min(row['corrected']) <= 0 <= max(row['corrected']) else '**'
                low, high = map(signed, row['interval'])
                expected.append(f"{value}: {mark}{signed(statistics.mean(row['differences']))}{mark} ({low} to {high})")
            elif name in older:
                expected.append(f"{value}: one run of 12 epochs: {signed(older[name]['val_bleu'])}")
            else:
                expected.append(f'{value}: not compared')
        assert rows[setting] == '; '.join(expected)


def test_searches_on_page_30_are_those_of_the_records():
    (rows,) = [table for table in shown_tables('30_recipes') if table[0][0] == 'epochs']
    older, full = load_result('recipe'), load_result('multi30k-en-de')
    penalties = [name.removeprefix('length penalty ') for name in rows[0][2:]]
    tried = {'12': older['searches'], '55': full['tried_on_val']}
    assert rows[1][2] == f"{older['searches']['greedy']:.1f} (greedy)"
    for epochs, beam, *scores in rows[2:]:
        expected = [tried[epochs].get(f'beam {beam}, alpha {penalty}') for penalty in penalties]
        assert scores == [f'{bleu:.1f}' if bleu else '–' for bleu in expected]
    averages = ', '.join(f'{name} {bleu:.1f}' for name, bleu in older['averages'].items())
    assert f"{averages} BLEU after {older['epochs']} epochs" in shown_text('30_recipes')


def test_prose_of_page_30_has_the_plan_of_the_sweep():
    cells = json.loads((record.RESULTS.parents[1] / 'nbs/30_recipes.ipynb').read_text('utf-8'))['cells']
    prose = ' '.join(' '.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown').split())
    training = RECIPES[recipe.RECIPE]['training']
    full = load_result('multi30k-en-de')['metrics']
    search = recipe.SEARCH
    sweeps = [made_up_sweep(SWEPT)]
    if (record.RESULTS / 'recipe-paired.json').exists():
        sweeps.append(load_result('recipe-paired'))
        assert (sweeps[-1]['seeds'], sweeps[-1]['search']) == ([1, 2, 3], search) and 'seed' not in sweeps[-1]
    for swept in sweeps:
        steps = {row['steps'] for name, row in swept['metrics']['variants'].items() if name.startswith('the recipe')}
        assert f"they are short: {swept['epochs']} of {training['max_epochs']} epochs" in prose
        assert steps == {1386} and f"{swept['epochs']} epochs has 1,386 steps, of which {training['warmup_steps']} are warm-up" in prose
    assert f"a full run has {full['steps']:,}." in prose
    assert f'The script has {len(recipe.VARIANTS)} changes' in prose
    assert f'Of the {len(recipe.VARIANTS)} changes in the script, three have been trained so far.' in prose
    assert len(sweeps[-1]['metrics']['paired']) == 3 or len(sweeps) == 1
    assert f"a beam of {search['beam_size']} and a length penalty of {search['length_penalty']}." in prose


def test_captions_on_page_10_have_the_scores_of_the_records():
    (rows,) = [table for table in shown_tables('10_english_to_german') if table[0][0] == 'model' and 'val: BLEU, chrF' in table[0]]
    names = [f'multi30k-en-de{end}' for end in ('', '-seed2', '-seed3')] + [f'gpu-en-de-wide-seed{seed}' for seed in (1, 2, 3)]
    for row, name in zip(rows[1:], names, strict=True):
        parts = [load_result(name)['scores'][split] for split in ('val', 'test_2016_flickr', 'test_2017_mscoco')]
        expected = [f"{part['bleu']:.1f} ± {part['bleu_half_width']:.1f}, {part['chrf']:.1f}" for part in parts]
        assert row[1:] == [*expected, f"{parts[1]['lowercased_tokenized_bleu']:.1f}"], name
    assert parts[0]['chrf_signature'] in shown_text('10_english_to_german')


def test_sentences_on_pages_10_and_30_have_the_scores_of_the_records():
    def prose(page):
        cells = json.loads((record.RESULTS.parents[1] / f'nbs/{page}.ipynb').read_text('utf-8'))['cells']
        return ' '.join(' '.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown').split())

    def scores(name, split, metric):
        return [load_result(f'{name}-seed{seed}')['scores'][split][metric] for seed in (1, 2, 3)]

    def margin(values, degrees=2):
        return t_quantile(degrees) * statistics.stdev(values) / 3 ** 0.5

    tokenized = 'lowercased_tokenized_bleu'
    r_drop, control = (scores(f'gpu-tok-{name}', 'test', tokenized) for name in ('r-drop', 'control'))
    assert f'[{statistics.mean(r_drop):.1f} ± {margin(r_drop):.1f}]' in prose('10_english_to_german')
    assert (f'reaches {statistics.mean(control):.1f} without R-Drop and {statistics.mean(r_drop):.1f} with it'
            in prose('30_recipes'))
    for split, sentence in (('val', '{:.1f} ± {:.1f} BLEU on `val`'), ('test', '{:.1f} ± {:.1f} on the test set')):
        pairs = zip(*(scores(f'gpu-tok-{name}', split, tokenized) for name in ('r-drop', 'control')))
        gains = [a - b for a, b in pairs]
        assert sentence.format(statistics.mean(gains), margin(gains)) in prose('30_recipes')

    small = [load_result(f'multi30k-en-de{end}')['scores']['test_2016_flickr'] for end in ('', '-seed2', '-seed3')]
    assert f"Our mean of this size is {statistics.mean(part[tokenized] for part in small):.1f}," in prose('10_english_to_german')


# --- processes.py

def check_counts(found):
    "Four bytes for each parameter; beside the gradient's buckets, a step exchanges the loss, and clock and signals."
    for size in found['metrics'].values():
        model = Transformer(TransformerConfig(**size['model']))
        assert size['bytes_per_step'] == sum(size['bucket_bytes']) == 4 * size['parameters'] == 4 * count_parameters(model)
        assert size['collectives_per_step'] == len(size['bucket_bytes']) + 2
        assert set(size['rounds']) == {'one', 'half', 'apart', 'weak', 'strong'}
        for name, seconds in size['rounds'].items():
            assert len(seconds) == len(size['all_reduce_rounds']) == found['settings']['rounds']
            assert size['step_seconds'][name] == {
                'median': statistics.median(seconds), 'low': min(seconds), 'high': max(seconds)}
        assert {launch: len(ranks) for launch, ranks in size['peak_mib'].items()} == {'one': 1, 'weak': 2, 'strong': 2}
        gradient_mib = size['bytes_per_step'] / 2**20
        assert all(peak > 4 * gradient_mib for ranks in size['peak_mib'].values() for peak in ranks) # and Adam's state


def test_record_of_two_processes_counts_what_they_exchange():
    found = json.loads((record.RESULTS / 'processes.json').read_text('utf-8'))
    assert set(found['metrics']) == {'tiny', 'small'} and found['settings']['rounds'] >= 5
    check_counts(found)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason='this PyTorch has no torch.distributed')
def test_processes_measures_one_and_two(tmp_path):
    found = measured('processes.py', tmp_path / 'processes.json', '--sizes', 'tiny', '--steps', '1')
    check_counts(found)
    for one_number, _, large in found['metrics']['tiny']['all_reduce_rounds']:
        assert 0 < one_number < large
