"Pairs on disk: the ids of `encode_pairs`, complete or not there, and encoded again when something changes."
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip('pyarrow', reason="no pyarrow: pip install 'annotated_transformer[large]'")

from annotated_transformer import large_corpora as module
from annotated_transformer.batches import encode_pairs
from annotated_transformer.corpora import load_corpus
from annotated_transformer.large_corpora import (
    EncodedPairs, in_parallel, open_pairs, source_files, train_tokenizer_on)
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.parallel_text import PairStream
from annotated_transformer.vocabulary import train_tokenizer

LANGS = ('en', 'de')
TEXTS = [(f'the dog {i % 7} sees {i} cats', f'der Hund {i % 7} sieht {i} Katzen') for i in range(250)]


@pytest.fixture(scope='module')
def tokenizer():
    return train_tokenizer('words', TEXTS, LANGS, 200)


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(module, 'SHARD', 100)
    return PairStream(lambda: TEXTS, settings={'corpus': 'test'})


def encode(stream, tokenizer, folder, **options):
    return open_pairs(stream, tokenizer, LANGS, folder=folder, progress_bar=False, **{'num_proc': 1} | options)


def as_lists(pairs):
    return [(list(map(int, src)), list(map(int, tgt))) for src, tgt in pairs]


@pytest.mark.parametrize('num_proc', [1, 2])
def test_ids_are_those_of_the_reference(stream, tokenizer, tmp_path, num_proc):
    pairs = encode(stream, tokenizer, tmp_path, num_proc=num_proc)
    expected = encode_pairs(TEXTS, tokenizer, LANGS)
    assert as_lists(pairs) == [(list(src), list(tgt)) for src, tgt in expected]
    assert len(pairs.shards) == 3
    assert pairs.lengths.tolist() == [[len(src) + 1, len(tgt) + 1] for src, tgt in expected]
    assert as_lists([pairs[i] for i in (-1, 99, 100)]) == as_lists([expected[i] for i in (-1, 99, 100)])
    assert pairs.tokens == tuple(pairs.lengths.sum(0))
    with pytest.raises(IndexError, match='pair 250 of 250'):
        pairs[250]


def test_training_batches_are_the_same(stream, tokenizer, tmp_path):
    loaders = [TrainingLoader(pairs, 128, seed=2)
               for pairs in (encode(stream, tokenizer, tmp_path), encode_pairs(TEXTS, tokenizer, LANGS))]
    for found, expected in zip(*(loader.epoch(1) for loader in loaders), strict=True):
        assert found.src.tolist() == expected.src.tolist() and found.tgt.tolist() == expected.tgt.tolist()


def test_the_library_datasets_can_open_a_shard(stream, tokenizer, tmp_path):
    datasets = pytest.importorskip('datasets', reason="no datasets: pip install 'annotated_transformer[large]'")
    pairs = encode(stream, tokenizer, tmp_path)
    loaded = datasets.Dataset.from_file(str(pairs.folder / 'data-00001.arrow'))
    assert loaded[23]['src'] == pairs[123][0].tolist()


def test_shards_are_mapped_and_not_copied(stream, tokenizer, tmp_path):
    pairs = encode(stream, tokenizer, tmp_path)
    values, offsets = pairs.shards[0][0]
    assert not values.flags.owndata and not offsets.flags.owndata and not values.flags.writeable
    if Path('/proc/self/maps').is_file():
        assert str(pairs.folder / 'data-00000.arrow') in Path('/proc/self/maps').read_text()


def test_without_pyarrow_the_error_says_what_to_install(stream, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    with pytest.raises(ImportError, match=r'need the library pyarrow: pip install .*\[large\]'):
        encode(stream, tokenizer, tmp_path)


def test_folders_of_another_version_are_not_reused(stream, tokenizer, tmp_path, monkeypatch):
    old = encode(stream, tokenizer, tmp_path)
    monkeypatch.setattr(module, 'FORMAT_VERSION', module.FORMAT_VERSION + 1)
    assert encode(stream, tokenizer, tmp_path).folder != old.folder


def test_long_sentences_are_truncated_with_a_warning(stream, tokenizer, tmp_path):
    with pytest.warns(UserWarning, match='250 of 250 sentence pairs have more than 4 positions'):
        pairs = encode(stream, tokenizer, tmp_path, max_len=4)
    with pytest.warns(UserWarning):
        assert as_lists(pairs) == as_lists(encode_pairs(TEXTS, tokenizer, LANGS, max_len=4))
    assert json.loads((pairs.folder / 'manifest.json').read_text())['truncated'] == 250


def test_a_folder_is_reused_until_something_changes(stream, tokenizer, tmp_path):
    file = tmp_path / 'source.tsv'
    file.write_text('a')
    stream = replace(stream, files=[file])
    def folders():
        return {path.name for path in (tmp_path / 'cache').iterdir() if path.is_dir()}
    encode(stream, tokenizer, tmp_path / 'cache')
    def unread():
        raise AssertionError('read again')
    encode(replace(stream, make=unread), tokenizer, tmp_path / 'cache')
    assert len(folders()) == 1
    encode(stream, tokenizer, tmp_path / 'cache', max_len=64)
    encode(replace(stream, settings={'corpus': 'test', 'unique': True}), tokenizer, tmp_path / 'cache')
    encode(stream, train_tokenizer('words', TEXTS, LANGS, 150), tmp_path / 'cache')
    before = source_files([file])
    os.utime(file, ns=(0, 0))
    assert source_files([file]) != before
    encode(stream, tokenizer, tmp_path / 'cache')
    assert len(folders()) == 5


def test_nothing_is_left_of_a_failure(stream, tokenizer, tmp_path):
    def broken():
        yield from TEXTS[:150]
        raise OSError('the drive is gone')
    with pytest.raises(OSError, match='the drive is gone'):
        encode(replace(stream, make=broken), tokenizer, tmp_path)
    with pytest.raises(ValueError, match='no training pairs are left'):
        encode(replace(stream, make=lambda: []), tokenizer, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_damaged_folders_are_named(stream, tokenizer, tmp_path):
    folder = encode(stream, tokenizer, tmp_path).folder
    shard = folder / 'data-00001.arrow'
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f'{len(content) - 1} bytes and should have {len(content)}'):
        EncodedPairs(folder)
    shard.unlink()
    with pytest.raises(ValueError, match='data-00001.arrow is missing'):
        EncodedPairs(folder)
    (folder / 'manifest.json').unlink()
    with pytest.raises(ValueError, match='no manifest.json'):
        EncodedPairs(folder)


@pytest.mark.parametrize('options, message', [({'num_proc': 0}, 'num_proc=0'), ({'max_len': 1}, 'max_len=1')])
def test_bad_settings_are_named(stream, tokenizer, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        encode(stream, tokenizer, tmp_path, **options)


def die(task):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(os.name == 'nt', reason='Windows has no SIGKILL')
def test_a_killed_worker_is_reported():
    with pytest.raises(ChildProcessError, match='try a smaller num_proc'):
        list(in_parallel(die, [(1,)], 2))


def test_tokenizer_of_a_stream_is_trained_on_a_sample(stream, monkeypatch):
    assert train_tokenizer_on('words', stream, LANGS, 200).state() == train_tokenizer_on('words', TEXTS, LANGS, 200).state()
    monkeypatch.setattr(module, 'SAMPLE', 20)
    small = train_tokenizer_on('words', stream, LANGS, 200)
    assert len(small) < 100
    assert small.state() == train_tokenizer_on('words', stream, LANGS, 200).state()


DATA = Path(os.environ.get('ANNOTATED_TRANSFORMER_MULTI30K')
            or Path(__file__).resolve().parents[2] / 'shared/data/multi30k')

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
