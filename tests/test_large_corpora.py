"Prepared corpora: the ids of `encode_pairs`, the same from any number of processes, complete or refused by name."
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip('datasets', reason="no datasets: pip install 'annotated_transformer[large]'")

from annotated_transformer import large_corpora as module
from annotated_transformer import loader as loader_module
from annotated_transformer import toy_languages
from annotated_transformer.batches import encode_pairs
from annotated_transformer.cli import main
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.downloads import WMT14_REVISION
from annotated_transformer.files import read_json
from annotated_transformer.large_corpora import PrepareConfig, WordCache, prepare, write_shard
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.parallel_text import PairStream
from annotated_transformer.prepared import PreparedPairs, check_prepared, open_prepared, read_manifest, read_split
from annotated_transformer.recipe import default_run
from annotated_transformer.trainer import TrainConfig
from annotated_transformer.vocabulary import load_tokenizer, train_tokenizer

LANGS = ('en', 'de')
ADJECTIVES = 'small large old tired black green happy'.split()
PAIRS = [(f'the {adjective} dog {i % 7} sees {i} cats .', f'der {adjective} Hund {i % 7} sieht {i} süße Katzen .')
         for i, adjective in zip(range(400), 100 * ADJECTIVES)]
SMALL = ('--preset toy --max-steps 6 --save-every 3 --d-model 32 --d-ff 64 --n-layers 1 --max-tokens 512 --max-len 40 '
         '--warmup-steps 4').split()


def write_text(folder, pairs=PAIRS):
    "Write pairs as two files, and return the options that name them."
    for side, lang in enumerate(LANGS):
        (folder / f'text.{lang}').write_text(''.join(pair[side] + '\n' for pair in pairs), encoding='utf-8')
    return {'src': folder / 'text.en', 'tgt': folder / 'text.de'}


@pytest.fixture
def config(tmp_path):
    return PrepareConfig(CorpusConfig('files', **write_text(tmp_path), held_out=20), vocab_size=200, shard_size=100)


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    "A prepared folder that no test changes, and its training pairs."
    folder = tmp_path_factory.mktemp('prepared')
    corpus = CorpusConfig('files', **write_text(folder), held_out=20)
    prepare(PrepareConfig(corpus, vocab_size=200, shard_size=100), folder / 'out', num_proc=1, progress_bar=False)
    return folder / 'out', load_corpus(corpus)['train']


def run(config, out, **options):
    return prepare(config, out, progress_bar=False, **{'num_proc': 1} | options)


def as_lists(pairs):
    return [(list(map(int, src)), list(map(int, tgt))) for src, tgt in pairs]


def contents(folder):
    "The bytes of every file of a prepared folder."
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def command(*args):
    return [sys.executable, '-m', 'annotated_transformer', *map(str, args)]


def fails(capsys, *args):
    "Run a command that must fail with exit code 2, and return what it says."
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    assert stop.value.code == 2
    return capsys.readouterr().err


# --- ids

@pytest.mark.parametrize('kind', ['bpe', 'words'])
@pytest.mark.parametrize('num_proc', [1, 2])
def test_ids_are_those_of_the_reference(config, tmp_path, kind, num_proc):
    config = replace(config, tokenizer=kind)
    manifest = run(config, tmp_path / 'out', num_proc=num_proc)
    corpus = load_corpus(config.corpus)
    tokenizer = load_tokenizer(tmp_path / 'out/tokenizer.json')
    expected = as_lists(encode_pairs(corpus['train'], tokenizer, LANGS))
    pairs = PreparedPairs(tmp_path / 'out')
    assert len(expected) == manifest['pairs'] == 360 and [shard['pairs'] for shard in manifest['shards']] == [100, 100, 100, 60]
    assert as_lists(pairs) == expected
    assert as_lists([pairs[i] for i in (-1, 99, 100)]) == [expected[i] for i in (-1, 99, 100)]
    assert pairs.tokens == tuple(sum(len(pair[side]) + 1 for pair in expected) for side in (0, 1))
    longer = [max(map(len, pair)) + 1 for pair in expected]
    assert pairs.length_counts.tolist() == np.bincount(longer).tolist()
    with pytest.raises(IndexError, match='pair 360 of 360'):
        pairs[360]
    for split in ('val', 'test'):
        assert read_split(tmp_path / 'out', split) == corpus[split]


TOKENIZER = train_tokenizer('bpe', PAIRS, LANGS, 200)
TEXTS = st.lists(st.one_of(st.sampled_from([src for src, _ in PAIRS[:9]]), st.text(max_size=30)), max_size=5)

@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, max_size=4), st.integers(1, 30))
def test_words_are_encoded_as_in_their_text(batches, capacity):
    cache = WordCache(TOKENIZER, capacity)
    for texts in batches:
        values, offsets = cache.encode_batch(texts)
        found = [values[start:end].tolist() for start, end in zip(offsets, offsets[1:])]
        assert found == TOKENIZER.encode_batch(texts)


def test_a_new_tokenizer_of_the_same_name_is_not_the_old_one(config, tmp_path):
    path = tmp_path / 'tokenizer.json'
    for vocab_size in (200, 100):
        tokenizer = train_tokenizer('bpe', PAIRS, LANGS, vocab_size)
        tokenizer.save(path, overwrite=True)
        write_shard(tmp_path / f'shard-{vocab_size}', PAIRS[:5], path, LANGS)
        from datasets import load_from_disk
        assert load_from_disk(str(tmp_path / f'shard-{vocab_size}'))['src'][:] == tokenizer.encode_batch([src for src, _ in PAIRS[:5]])


def test_long_sentences_are_truncated_with_a_warning(prepared):
    folder, train = prepared
    with pytest.warns(UserWarning, match='sentence pairs truncated to 4 positions: 360 of 360'):
        pairs = open_prepared(folder, max_len=4)
    with pytest.warns(UserWarning):
        assert as_lists(pairs) == as_lists(encode_pairs(train, load_tokenizer(folder / 'tokenizer.json'), LANGS, max_len=4))
    assert pairs.length_counts.tolist() == [0, 0, 0, 0, 360] and pairs.tokens == (4 * 360, 4 * 360)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        open_prepared(folder, max_len=100)
    with pytest.raises(ValueError, match='max_len=1'):
        PreparedPairs(folder, max_len=1)


def test_cleaning_is_that_of_the_corpus(tmp_path):
    pairs = [*PAIRS, *PAIRS[:50], ('too ' * 20, 'lang'), ('', 'leer')]
    corpus = CorpusConfig('files', **write_text(tmp_path, pairs), held_out=20, max_words=10, unique=True)
    manifest = run(PrepareConfig(corpus, vocab_size=200, shard_size=100), tmp_path / 'out')
    plain = load_corpus(corpus)
    assert manifest['pairs'] == len(plain['train'])
    assert manifest['dropped'] == plain.dropped and manifest['dropped']['duplicate'] > 40
    assert manifest['dropped']['too long'] == manifest['dropped']['blank'] == 1


def test_tokenizer_is_trained_on_a_sample(config, tmp_path):
    train = load_corpus(config.corpus)['train']
    for sample_size, seed in ((10_000, 1), (30, 1), (30, 2)):
        out = tmp_path / f'out-{sample_size}-{seed}'
        run(replace(config, sample_size=sample_size, seed=seed), out)
        sample = PairStream(lambda: train).sample(sample_size, seed)
        assert load_tokenizer(out / 'tokenizer.json').state() == train_tokenizer('bpe', sample, LANGS, 200).state()
    given = run(replace(config, tokenizer=str(tmp_path / 'out-30-1')), tmp_path / 'given')
    assert given['files']['tokenizer.json'] == read_manifest(tmp_path / 'out-30-1')['files']['tokenizer.json']
    with pytest.raises(ValueError, match='out-30-1 is for en-de, not de-en'):
        run(replace(config, tokenizer=str(tmp_path / 'out-30-1'), corpus=replace(config.corpus, pair='de-en')), tmp_path / 'other')


# --- several processes, and their end

def test_two_shares_are_the_same_data_as_one(config, tmp_path, capsys):
    run(config, tmp_path / 'one', num_proc=2)
    write = ('prepare', '--src', config.corpus.src, '--tgt', config.corpus.tgt, '--held-out', 20, '--vocab-size', 200,
             '--shard-size', 100, '--num-proc', 1, '--out', tmp_path / 'two')
    process = subprocess.Popen(command(*write, '--shard', '1/2'), stdout=subprocess.PIPE, text=True)
    main([str(arg) for arg in (*write, '--shard', '2/2')]) # in this process, at the same time
    said = [process.communicate(timeout=120)[0], capsys.readouterr().out]
    assert process.returncode == 0
    assert any('annotated-transformer train --prepared' in text for text in said)
    one = contents(tmp_path / 'one')
    two = contents(tmp_path / 'two')
    assert two == one and sum(name.endswith('.arrow') for name in one) == 6


def test_a_share_alone_is_not_a_corpus(config, tmp_path, capsys):
    assert run(config, tmp_path / 'out', share=(2, 2)) is None
    assert sorted(path.name for path in (tmp_path / 'out').glob('shard-*')) == ['shard-00001', 'shard-00003']
    assert 'out is not complete: run the same `annotated-transformer prepare` again' in fails(
        capsys, 'train', '--prepared', tmp_path / 'out', '--out', tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
    assert run(config, tmp_path / 'out')['pairs'] == 360


@pytest.mark.slow
@pytest.mark.skipif(os.name == 'nt', reason='Windows has no SIGKILL')
def test_a_killed_process_loses_at_most_one_shard(tmp_path):
    import psutil
    pairs = [(f'{src} {i}', f'{tgt} {i}') for i in range(15) for src, tgt in PAIRS]
    write = ('prepare', '--src', write_text(tmp_path, pairs)['src'], '--tgt', tmp_path / 'text.de', '--held-out', 20,
             '--vocab-size', 300, '--shard-size', 500, '--num-proc', 2, '--out', tmp_path / 'out')
    process = psutil.Popen(command(*write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    def finished():
        return {path.name: path.stat().st_mtime_ns for path in (tmp_path / 'out').glob('shard-?????')}
    deadline = time.monotonic() + 120
    while len(finished()) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    children = process.children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = finished()
    assert 3 <= len(before) < 12
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, 'workers wait for a process that was killed'

    subprocess.run(command(*write), check=True, capture_output=True)
    after = finished()
    assert len(after) == 12 and {name: after[name] for name in before} == before # nothing finished was written again
    assert not list((tmp_path / 'out').glob('*.partial'))
    check_prepared(tmp_path / 'out')
    corpus = CorpusConfig('files', src=tmp_path / 'text.en', tgt=tmp_path / 'text.de', held_out=20)
    run(PrepareConfig(corpus, vocab_size=300, shard_size=500), tmp_path / 'whole')
    assert contents(tmp_path / 'out') == contents(tmp_path / 'whole')


def test_a_failure_in_a_shard_leaves_nothing_of_it(config, tmp_path, monkeypatch):
    def broken(record):
        raise OSError('the drive is full')
    monkeypatch.setattr(module, 'to_json', broken)
    with pytest.raises(OSError, match='the drive is full'):
        write_shard(tmp_path / 'shard-00000', PAIRS[:5], TOKENIZER.save(tmp_path / 'tokenizer.json'), LANGS)
    assert not list(tmp_path.glob('shard-*'))


def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.skipif(os.name == 'nt', reason='Windows has no SIGKILL')
def test_a_killed_worker_is_reported(config, tmp_path, monkeypatch):
    monkeypatch.setattr(module, 'encode_rows', die)
    with pytest.raises(ChildProcessError, match='try a smaller num_proc'):
        run(config, tmp_path / 'out', num_proc=2)


def test_a_shard_that_another_process_writes_is_left_alone(config, tmp_path):
    (tmp_path / 'out').mkdir()
    with open(tmp_path / 'out/.shard-00002.lock', 'w') as lock:
        assert module.try_lock(lock)
        assert run(config, tmp_path / 'out') is None
    assert not (tmp_path / 'out/shard-00002').exists() and (tmp_path / 'out/shard-00003').exists()
    assert run(config, tmp_path / 'out')['pairs'] == 360


# --- what has changed

def change(path):
    "Change one character of a file, not its size and not its time."
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize('name, message', [
    ('out/shard-00002/data-00000-of-00001.arrow', 'is not as it was prepared: {path} has other content'),
    ('out/shard-00001/state.json', 'is not as it was prepared: {path} has other content'),
    ('out/splits/val/data-00000-of-00001.arrow', 'is not as it was prepared: {path} has other content'),
    ('text.de', 'was prepared from text that has changed since: {path} has other content'),
])
def test_a_changed_corpus_is_refused_by_name(config, tmp_path, capsys, name, message):
    run(config, tmp_path / 'out')
    main([str(arg) for arg in ('train', '--prepared', tmp_path / 'out', '--out', tmp_path / 'good', *SMALL)])
    change(tmp_path / name)
    said = fails(capsys, 'train', '--prepared', tmp_path / 'out', '--out', tmp_path / 'run', *SMALL)
    assert f'{tmp_path}/out {message.format(path=tmp_path / name)}' in said
    assert not (tmp_path / 'run').exists()


def test_another_tokenizer_is_refused_by_name(config, tmp_path, capsys):
    run(config, tmp_path / 'out')
    train_tokenizer('bpe', PAIRS, LANGS, 199).save(tmp_path / 'out/tokenizer.json', overwrite=True)
    said = fails(capsys, 'train', '--prepared', tmp_path / 'out', '--out', tmp_path / 'run', *SMALL)
    assert f'out is not as it was prepared: {tmp_path}/out/tokenizer.json has ' in said
    assert not (tmp_path / 'run').exists()


def test_missing_parts_are_named_and_made_again(config, tmp_path):
    run(config, tmp_path / 'out')
    whole = contents(tmp_path / 'out')
    shard = tmp_path / 'out/shard-00001'
    for path in shard.iterdir():
        path.unlink()
    shard.rmdir()
    with pytest.raises(ValueError, match='shard-00001/data-00000-of-00001.arrow is missing.*remove what has changed and manifest.json'):
        run(config, tmp_path / 'out')
    (tmp_path / 'out/manifest.json').unlink()
    run(config, tmp_path / 'out')
    assert contents(tmp_path / 'out') == whole


def test_a_folder_may_travel_without_its_text(config, tmp_path):
    run(config, tmp_path / 'out')
    for path in config.corpus.files:
        path.unlink()
    (tmp_path / 'out').rename(tmp_path / 'elsewhere')
    check_prepared(tmp_path / 'elsewhere')


def test_a_shard_of_another_tokenizer_is_not_taken_over(config, tmp_path):
    run(config, tmp_path / 'out', share=(1, 2))
    train_tokenizer('bpe', PAIRS, LANGS, 150).save(tmp_path / 'out/tokenizer.json', overwrite=True)
    with pytest.raises(ValueError, match='shard-00000 was encoded with another tokenizer.json'):
        run(config, tmp_path / 'out')


def test_other_settings_or_text_need_another_folder(config, tmp_path):
    run(config, tmp_path / 'out', share=(1, 2))
    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            run(replace(config, **changes), tmp_path / 'out')
    refused('tokenizer.vocab_size was 200 and is now 300', vocab_size=300)
    refused('shard_size was 100 and is now 50', shard_size=50)
    refused('corpus.max_words was None and is now 30', corpus=replace(config.corpus, max_words=30))
    change(tmp_path / 'text.en')
    refused('was begun with other text: .*text.en has changed')
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis.txt').write_text('years of work')
    with pytest.raises(ValueError, match='mine exists but holds no prepared corpus'):
        run(config, tmp_path / 'mine')
    with pytest.raises(ValueError, match='mine is not a prepared corpus'):
        read_manifest(tmp_path / 'mine')


def test_the_manifest_names_the_revision_of_a_download(tmp_path, monkeypatch, capsys):
    import datasets
    revisions = []
    def load_dataset(path, name, revision, split):
        assert (path, name) == ('wmt/wmt14', 'de-en')
        revisions.append(revision)
        rows = {'train': PAIRS, 'validation': PAIRS[:7], 'test': PAIRS[7:9]}[split]
        return datasets.Dataset.from_list([{'translation': {'de': de, 'en': en}} for en, de in rows])
    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    command = ['prepare', '--corpus', 'wmt14', '--out', str(tmp_path / 'out'), '--vocab-size', '200', '--num-proc', '1']
    main(command)
    manifest = read_manifest(tmp_path / 'out')
    assert set(revisions) == {manifest['settings']['corpus']['revision']} == {WMT14_REVISION}
    said = ' '.join(capsys.readouterr().out.split())
    assert f'wmt14, revision {WMT14_REVISION}' in said and 'has the hashes' not in said
    monkeypatch.setattr(module, 'WMT14_REVISION', 40 * '0')
    assert f"corpus.revision was '{WMT14_REVISION}' and is now '{40 * '0'}'" in fails(capsys, *command)


def test_a_folder_of_another_version_must_be_prepared_again(prepared, tmp_path):
    manifest = read_json(prepared[0] / 'manifest.json')
    (tmp_path / 'manifest.json').write_text(json.dumps(manifest | {'format': 99}))
    with pytest.raises(ValueError, match='has format 99, but this version reads format 1'):
        read_manifest(tmp_path)


@pytest.mark.parametrize('changes, options, message', [
    ({'sample_size': 0}, {}, 'sample_size=0'), ({'shard_size': 0}, {}, 'shard_size=0'), ({}, {'num_proc': 0}, 'num_proc=0'),
    ({}, {'share': (3, 2)}, 'shard=3/2'), ({}, {'share': (0, 2)}, 'shard=0/2'), ({'tokenizer': 'letters'}, {}, 'letters')])
def test_bad_settings_are_named(config, tmp_path, changes, options, message):
    with pytest.raises((ValueError, OSError), match=message):
        run(replace(config, **changes), tmp_path / 'out', **options)
    assert not (tmp_path / 'out').exists()


def test_a_corpus_without_training_pairs_says_why(tmp_path):
    corpus = CorpusConfig('files', **write_text(tmp_path), max_words=2)
    with pytest.raises(ValueError, match='no training pairs are left'):
        run(PrepareConfig(corpus, vocab_size=200), tmp_path / 'out')
    with pytest.raises(ValueError, match='is prepared already'):
        PrepareConfig(CorpusConfig('prepared', prepared=tmp_path))


def test_mistakes_and_assumed_languages_are_noticed_before_training(tmp_path, capsys):
    files = write_text(tmp_path, [(src, src) for src, _ in PAIRS[:99]] + PAIRS[99:])
    args = ['prepare', '--src', files['src'], '--tgt', files['tgt'], '--held-out', 20, '--vocab-size', 200, '--num-proc', 1]
    main([str(arg) for arg in (*args, '--out', tmp_path / 'out')])
    said = capsys.readouterr()
    assert f'{tmp_path}/text.en: in ' in said.err and 'source and target are equal' in said.err
    assert 'without --pair, the source is labelled English and the target German' in said.err
    main([str(arg) for arg in (*args, '--pair', 'en-nl', '--out', tmp_path / 'named')])
    said = capsys.readouterr()
    assert '--pair' not in said.err and 'English to Dutch (en-nl) is prepared' in said.out
    assert re.search(r'\n +first val pair +English: the .*\n +Dutch: +(the|der) ', said.out)
    main([str(arg) for arg in ('train', '--prepared', tmp_path / 'named', '--out', tmp_path / 'run', *SMALL)])
    said = capsys.readouterr()
    assert '--pair' not in said.err and 'Training English to Dutch (en-nl)' in said.out


def test_without_datasets_the_error_says_what_to_install(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(ImportError, match=r'need the library datasets: pip install .*\[large\]'):
        run(config, tmp_path / 'out')


# --- reading

def test_the_library_datasets_can_open_a_shard(prepared):
    from datasets import load_from_disk
    loaded = load_from_disk(str(prepared[0] / 'shard-00001'))
    assert loaded[23]['src'] == PreparedPairs(prepared[0])[123][0].tolist()
    assert str(loaded.features['src'].feature) == "Value('uint16')"


def rows_of(batch):
    return sorted(tuple(row[row != 0].tolist()) for row in batch.tgt)


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(loader_module, 'WINDOW', 64)
    monkeypatch.setattr(loader_module, 'BLOCK', 16)


def test_training_batches_are_those_of_a_list(prepared, small_windows):
    folder, train = prepared
    ids = encode_pairs(train, load_tokenizer(folder / 'tokenizer.json'), LANGS)
    loaders = [TrainingLoader(pairs, 256, seed=2) for pairs in (PreparedPairs(folder), ids)]
    assert len(loaders[0]) == len(loaders[1])
    for found, expected in zip(*(loader.epoch(1) for loader in loaders), strict=True):
        assert found.src.tolist() == expected.src.tolist() and found.tgt.tolist() == expected.tgt.tolist()


def test_an_epoch_is_a_permutation_and_resumes_on_another_number_of_processes(prepared, small_windows):
    pairs = PreparedPairs(prepared[0])
    loader = TrainingLoader(pairs, 256, seed=2)
    order = np.concatenate(list(loader.index_batches(3)))
    assert sorted(order.tolist()) == list(range(len(pairs)))
    assert order.tolist() != np.concatenate(list(loader.index_batches(4))).tolist()
    assert order.tolist() != np.concatenate(list(TrainingLoader(pairs, 256, seed=1).index_batches(3))).tolist()
    whole = [rows_of(batch) for batch in loader.epoch(3)]
    assert len(whole) > 12
    for size in (1, 2, 3): # one process trained on seven batches; then the job resumes on so many
        parts = [TrainingLoader(PreparedPairs(prepared[0]), 256, seed=2, rank=rank, world_size=size).epoch(3, start=7)
                 for rank in range(size)]
        resumed = [sorted(row for part in shares for row in rows_of(part)) for shares in zip(*parts, strict=True)]
        assert resumed == whole[7:]


def test_no_file_stays_mapped(prepared, small_windows):
    if not Path('/proc/self/maps').is_file():
        pytest.skip('no /proc/self/maps')
    gc.collect()
    gc.freeze() # what was there before need not be searched after each batch
    try:
        for batch in TrainingLoader(PreparedPairs(prepared[0]), 256).epoch(0):
            gc.collect()
            assert str(prepared[0]) not in Path('/proc/self/maps').read_text()
    finally:
        gc.unfreeze()


def test_one_shard_is_mapped_at_a_time(prepared, monkeypatch):
    "Mapped pages count as memory of the process: with all shards open, it would grow with the corpus."
    if not Path('/proc/self/maps').is_file():
        pytest.skip('no /proc/self/maps')
    mapped = []
    open_shard = PreparedPairs.open_shard
    def counted(pairs, k):
        shard = open_shard(pairs, k)
        lines = Path('/proc/self/maps').read_text().splitlines()
        mapped.append(len({line.split()[-1] for line in lines if str(prepared[0]) in line}))
        return shard
    monkeypatch.setattr(PreparedPairs, 'open_shard', counted)
    rows = np.random.default_rng(0).permutation(360)
    pairs = PreparedPairs(prepared[0])
    found, _ = pairs.read(rows)
    assert len(mapped) == 4 and max(mapped) <= 2 # the next one is opened before the last one is closed
    everything = as_lists(pairs)
    assert as_lists(found) == [everything[i] for i in rows]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    "Four times as many pairs. With the lengths of all pairs in memory, the peak would grow by 0.4 MB."
    monkeypatch.setattr(loader_module, 'WINDOW', 2048)
    monkeypatch.setattr(loader_module, 'BLOCK', 512)
    path = TOKENIZER.save(tmp_path / 'tokenizer.json')
    peaks = []
    for n_shards in (2, 8):
        folder = tmp_path / str(n_shards)
        corpus = CorpusConfig('files', **write_text(tmp_path, PAIRS * 10 * n_shards), held_out=1)
        run(PrepareConfig(corpus, tokenizer=str(path), shard_size=4000), folder)
        gc.collect()
        tracemalloc.start()
        loader = TrainingLoader(PreparedPairs(folder), 4096)
        n_rows = sum(len(lengths) for _, _, lengths, _ in loader.read_windows(0))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert n_rows == len(PreparedPairs(folder)) > 3900 * n_shards
    assert peaks[1] < peaks[0] + 250_000


# --- training

def test_a_run_trains_resumes_and_is_scored_on_its_held_out_pairs(config, tmp_path, capsys):
    run(config, tmp_path / 'out')
    train = ('train', '--prepared', tmp_path / 'out', '--out', tmp_path / 'run', *SMALL)
    main([str(arg) for arg in train])
    said = capsys.readouterr().out
    assert f'360 pairs with' in said and f'prepared in {tmp_path}/out' in said
    assert load_tokenizer(tmp_path / 'run/tokenizer.json').state() == load_tokenizer(tmp_path / 'out/tokenizer.json').state()
    main(['evaluate', '--model', str(tmp_path / 'run'), '--beam-size', '1', '--samples', '0'])
    assert 'prepared test: 20 sentences' in capsys.readouterr().out


def test_the_prepared_folder_decides_recipe_languages_and_vocabulary(tmp_path, monkeypatch):
    from annotated_transformer.cli import parse
    monkeypatch.setitem(toy_languages.SPLITS, 'train', 1000)
    corpus = CorpusConfig('toy-ende', pair='de-en')
    run(PrepareConfig(corpus, vocab_size=300), tmp_path / 'out')
    train = parse(['train', '--prepared', str(tmp_path / 'out')])
    assert train.run.corpus == CorpusConfig('prepared', 'de-en', prepared=tmp_path / 'out')
    assert train.run == default_run(train.run.corpus)
    assert train.run.model.vocab_size == len(load_tokenizer(tmp_path / 'out/tokenizer.json')) == 300
    assert train.run.training == default_run(corpus).training # the recipe of toy-ende
    assert load_corpus(train.run.corpus)['test_long'] == load_corpus(corpus)['test_long']
    with pytest.raises(ValueError, match='out was prepared for de-en'):
        load_corpus('prepared', prepared=tmp_path / 'out')


@pytest.mark.parametrize('options, message', [
    ({'max_words': 9}, 'max_words=9 is an option of `annotated-transformer prepare`'),
    ({'held_out': 9}, 'held_out=9 is an option of corpus files and tsv, not of prepared'),
    ({'prepared': None}, 'corpus prepared needs `prepared`')])
def test_options_of_the_text_belong_to_prepare(prepared, options, message):
    with pytest.raises(ValueError, match=message):
        CorpusConfig('prepared', **{'prepared': prepared[0]} | options)


def test_bpe_dropout_needs_text(prepared):
    run = default_run(CorpusConfig('prepared', prepared=prepared[0]))
    with pytest.raises(ValueError, match='bpe_dropout encodes the text anew'):
        replace(run, bpe_dropout=0.1)
    assert isinstance(run.training, TrainConfig)


DATA = Path(os.environ.get('ANNOTATED_TRANSFORMER_MULTI30K')
            or Path(__file__).resolve().parents[2] / 'shared/data/multi30k')

@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason='no Multi30k: set ANNOTATED_TRANSFORMER_MULTI30K to its folder')
def test_a_tokenizer_of_a_tenth_of_multi30k_costs_a_few_percent():
    "The figures of page 23."
    corpus = load_corpus('multi30k', data_dir=DATA)
    n_tokens = []
    for pairs in (PairStream(lambda: corpus['train']).sample(2900), corpus['train']):
        trained = train_tokenizer('bpe', pairs, LANGS, 8000)
        n_tokens.append([sum(map(len, trained.encode_batch([pair[side] for pair in corpus['val']], lang)))
                         for side, lang in enumerate(LANGS)])
    longer = [sample / whole for sample, whole in zip(*n_tokens)]
    assert all(1.015 < ratio < 1.045 for ratio in longer)
