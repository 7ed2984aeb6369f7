"What the page on large corpora cannot show: killed while encoding, several at once, a full disk, and a million pairs."
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from annotated_transformer.v1 import large_corpora
from annotated_transformer.v1.batches import BatchLoader, encode_pairs
from annotated_transformer.v1.corpora import Stream, load_corpus
from annotated_transformer.v1.vocabulary import Tokenizer, train_tokenizer

datasets = pytest.importorskip('datasets', reason="no datasets: pip install 'annotated_transformer[large]'")
psutil = pytest.importorskip('psutil')
ROOT = Path(__file__).resolve().parents[2]
LANGS = ('en', 'de')


def random_texts(n, seed=0):
    rng = random.Random(seed)
    def side():
        return ' '.join(rng.choice(('wort', 'satz', 'haus', 'hund', 'katze'))
                        for _ in range(1 + rng.randrange(9)))
    return [(f'{side()} {i}', f'{side()} {i}') for i in range(n)]


@pytest.fixture
def table(tmp_path):
    path = tmp_path/'a.tsv'
    path.write_text(''.join(f'{s}\t{t}\n' for s, t in random_texts(2000)))
    return path


@pytest.fixture
def vocabulary(): return train_tokenizer('bpe', random_texts(300), LANGS, vocab_size=100)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch): monkeypatch.setattr(large_corpora, 'SHARD', 500)


def stream_of(table, **options): return load_corpus('tsv', tsv=table, on_disk=True, held_out=50, **options)['train']
def opened(stream, vocabulary, folder, **options):
    return large_corpora.open_pairs(stream, vocabulary, LANGS, folder=folder, progress_bar=False,
                                    **{'num_proc': 1} | options)
def as_lists(pairs): return [(src.tolist(), tgt.tolist()) for src, tgt in pairs]
def content(folder): return {p.name: p.read_bytes() for p in Path(folder).iterdir()}
def made(folder): return sorted(p.name for p in Path(folder).iterdir() if p.suffix != '.lock')


def test_the_same_from_any_number_of_processes(table, vocabulary, tmp_path):
    stream = stream_of(table)
    one, two, three = (opened(stream, vocabulary, tmp_path/f'{k}', num_proc=k) for k in (1, 2, 3))
    assert as_lists(one) == encode_pairs(list(stream), vocabulary, LANGS) and len(one.shards) == 4
    assert content(one.folder) == content(two.folder) == content(three.folder)
    if (maps := Path('/proc/self/maps')).exists(): # mapped, and not read into memory
        assert str(one.folder/'data-00000') in maps.read_text()


def test_words_and_wide_ids(table, tmp_path):
    words = train_tokenizer('words', random_texts(50), LANGS, vocab_size=30)
    assert (as_lists(opened(stream_of(table), words, tmp_path/'cache', num_proc=2))
            == encode_pairs(list(stream_of(table)), words, LANGS))

    class Wide(Tokenizer):
        "A vocabulary whose ids do not fit into two bytes."
        kind = 'bpe'
        def __len__(self): return 1 << 20
        def encode_batch(self, texts, lang=None): return [[70_000 + len(text)] for text in texts]
    found, cut = large_corpora.shard_table([('a', 'bc')], Wide(), LANGS)
    assert (found.to_pylist() == [{'src': [70_001], 'tgt': [70_002]}]
            and str(found.column('src').type.value_type) == 'int32' and cut == 0)


def test_loading_is_as_from_a_list(table, vocabulary, tmp_path):
    pairs, plain = (opened(stream_of(table), vocabulary, tmp_path/'cache'),
                    encode_pairs(list(stream_of(table)), vocabulary, LANGS))
    for options in (dict(), dict(rank=1, world_size=3), dict(multiple=8)):
        loaders = [BatchLoader(p, 300, seed=4, **options) for p in (pairs, plain)]
        assert len(loaders[0]) == len(loaders[1])
        for a, b in zip(*(loader.epoch(2, start=5) for loader in loaders), strict=True):
            assert (torch.equal(a.src, b.src) and torch.equal(a.tgt, b.tgt)
                    and (a.n_tokens, a.global_tokens) == (b.n_tokens, b.global_tokens))


def test_reused_unless_something_changed(table, vocabulary, tmp_path):
    folder = tmp_path/'cache'
    def read(): raise AssertionError('read again')
    opened(stream_of(table), vocabulary, folder)
    silent = stream_of(table)
    silent.make = read
    assert len(opened(silent, vocabulary, folder)) == 1900 and silent.dropped['blank'] == 0
    changes = [
        lambda: opened(stream_of(table), vocabulary, folder, max_len=99),
        lambda: opened(stream_of(table, max_words=5), vocabulary, folder),
        lambda: opened(stream_of(table), train_tokenizer('bpe', random_texts(300), LANGS, vocab_size=99), folder),
        lambda: (table.write_text(table.read_text() + 'new\tneu\n'), opened(stream_of(table), vocabulary, folder))]
    for k, change in enumerate(changes, 2):
        change()
        assert len(made(folder)) == k
        opened(stream_of(table), vocabulary, folder)
        assert len(made(folder)) == k
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        opened(stream_of(table), vocabulary, folder, max_len=99)
    with pytest.warns(UserWarning, match=r'\d+ of 1901 sentence pairs are longer than 5 positions'):
        short = opened(stream_of(table), vocabulary, folder, max_len=5)
    assert short.lengths.max() == 5 and short.lengths.dtype == np.uint16


@pytest.mark.parametrize('spoil', ['truncate', 'remove', 'no manifest'])
def test_a_damaged_folder_is_named(table, vocabulary, tmp_path, spoil):
    pairs = opened(stream_of(table), vocabulary, tmp_path/'cache')
    shard, folder = pairs.folder/'data-00002.arrow', pairs.folder
    del pairs
    if spoil == 'truncate': os.truncate(shard, 100)
    elif spoil == 'remove': shard.unlink()
    else: (folder/'manifest.json').unlink()
    with pytest.raises(ValueError, match='data-00002.arrow|manifest.json'):
        opened(stream_of(table), vocabulary, tmp_path/'cache')
    shutil.rmtree(folder)
    assert len(opened(stream_of(table), vocabulary, tmp_path/'cache')) == 1900


def test_an_error_in_the_text_leaves_nothing(table, vocabulary, tmp_path):
    with open(table, 'ab') as file: file.write(b'one column\n')
    for num_proc in (1, 2):
        stream = Stream(lambda: iter(large_corpora_lines(table)), [table])
        with pytest.raises(ValueError, match='a.tsv, line 2001: one column'):
            opened(stream, vocabulary, tmp_path/'cache', num_proc=num_proc)
        assert made(tmp_path/'cache') == []
    for options in (dict(max_len=1), dict(num_proc=0)):
        with pytest.raises(ValueError, match='|'.join(options)): opened(stream, vocabulary, tmp_path/'cache', **options)


def large_corpora_lines(table):
    from annotated_transformer.v1.corpora import stream_tsv
    return stream_tsv(table)


def test_without_the_library(monkeypatch, table, vocabulary, tmp_path):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[large\]'"):
        opened(stream_of(table), vocabulary, tmp_path/'cache')
    (tmp_path/'train.parquet').write_bytes(b'')
    with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[large\]'"):
        list(load_corpus('wmt14', data_dir=tmp_path)['train'])


def test_wmt14_end_to_end(tmp_path, vocabulary):
    texts = random_texts(1200)
    for split, part in (('train-00000-of-00002', texts[:700]), ('train-00001-of-00002', texts[700:]),
                        ('validation', texts[:5]), ('test', texts[5:9])):
        (tmp_path/'wmt'/'de-en').mkdir(parents=True, exist_ok=True)
        rows = [{'translation': {'de': de, 'en': en}} for en, de in part]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path/'wmt'/'de-en'/f'{split}.parquet')
    corpus = load_corpus('wmt14', data_dir=tmp_path/'wmt', unique=True)
    tokenizer = large_corpora.tokenizer_for('bpe', corpus['train'], corpus.langs, 100)
    pairs = opened(corpus['train'], tokenizer, tmp_path/'cache')
    assert as_lists(pairs) == encode_pairs(texts, tokenizer, LANGS)
    assert pairs.dropped == corpus.dropped == {'blank': 0, 'too long': 0, 'ratio': 0, 'duplicate': 0}
    assert (corpus['val'], corpus['test']) == (texts[:5], texts[5:9]) and 'wmt14-en-de-' in pairs.folder.name


# --- processes of their own

PROGRAM = '''
import sys
from pathlib import Path
from annotated_transformer.v1 import large_corpora
from annotated_transformer.v1.corpora import load_corpus
from annotated_transformer.v1.vocabulary import load_tokenizer
large_corpora.SHARD = 500
table, tokenizer, folder, num_proc = sys.argv[1:]
stream = load_corpus('tsv', tsv=table, on_disk=True, held_out=50)['train']
print('ready', flush=True)
pairs = large_corpora.open_pairs(stream, load_tokenizer(tokenizer), ('en', 'de'), None, folder, int(num_proc), False)
print(len(pairs), pairs.manifest['pairs'], flush=True)
'''


@pytest.fixture
def program(tmp_path, vocabulary):
    "A table of 20,000 pairs, and what starts a process that encodes it."
    table, tokenizer = tmp_path/'big.tsv', vocabulary.save(tmp_path/'tokenizer.json')
    table.write_text(''.join(f'{s}\t{t}\n' for s, t in random_texts(20_000)))
    environment = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    def start(folder, num_proc=2, **options):
        return subprocess.Popen([sys.executable, '-c', PROGRAM, table, tokenizer, folder, str(num_proc)],
                                text=True, env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    return start


def test_killed_at_any_moment(program, tmp_path):
    """Whenever it is killed: no folder, or the whole one; nobody is left running;
    the next attempt ends as if nothing had been.
    """
    process = program(tmp_path/'reference')
    process.stdout.readline()
    began = time.monotonic()
    assert process.communicate()[0] == '19900 19900\n'
    seconds = time.monotonic() - began
    [reference] = made(tmp_path/'reference')
    expected, rng, partial = content(tmp_path/'reference'/reference), random.Random(0), 0
    for k in range(4):
        process = program(tmp_path/'cache')
        assert process.stdout.readline() == 'ready\n'
        time.sleep((0.3 + 0.6*rng.random())*seconds)
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
        alive = [child for child in psutil.wait_procs(children, timeout=20)[1]
                 if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        for child in alive: child.kill()
        process.communicate()
        assert not alive                                          # the workers have gone with it
        for name in made(tmp_path/'cache'):
            if name.endswith('.partial'): partial += 1
            else:
                assert content(tmp_path/'cache'/name) == expected
                shutil.rmtree(tmp_path/'cache'/name)
    assert partial                                                # at least one was killed at work
    assert program(tmp_path/'cache').communicate()[0] == 'ready\n19900 19900\n'
    assert made(tmp_path/'cache') == [reference] and content(tmp_path/'cache'/reference) == expected


def test_two_at_once(program, tmp_path):
    "Both want the same: one makes it, the other waits for it and uses it."
    both = [program(tmp_path/'cache', num_proc=1) for _ in range(2)]
    for process in both: assert process.communicate(timeout=100)[0] == 'ready\n19900 19900\n'
    assert len(made(tmp_path/'cache')) == 1


def test_ctrl_c(program, tmp_path):
    process = program(tmp_path/'cache', start_new_session=True)
    process.stdout.readline()
    for _ in range(2000):
        if list((tmp_path/'cache').glob('*.partial/*.arrow')) or process.poll() is not None: break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)                          # as a terminal does: to all of them
    said = process.communicate(timeout=60)[1]
    assert process.returncode and said.count('Traceback') <= 2 and 'KeyboardInterrupt' in said
    assert made(tmp_path/'cache') == []


@pytest.mark.parametrize('num_proc', [1, 2])
def test_no_room_on_the_disk(program, tmp_path, num_proc):
    "A file may not grow beyond 10 kB: one line that says so, and nothing is left."
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    process = program(tmp_path/'cache', num_proc, preexec_fn=limit)
    said = process.communicate(timeout=60)[1].strip().splitlines()[-1]
    assert process.returncode and said.startswith('OSError') and 'File too large' in said
    assert made(tmp_path/'cache') == []


BENCHMARK = ROOT/'benchmarks/large_corpus.py'

def rehearse(*options, timeout):
    done = subprocess.run([sys.executable, BENCHMARK, '--out', '-', *map(str, options)],
                          capture_output=True, text=True, timeout=timeout,
                          env=os.environ | {'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    names, *lines = [line.replace(',', '').split() for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(names, map(float, line))) for line in lines if line[0].isdigit()]


def test_the_benchmark_runs():
    rows = rehearse('--sizes', 400, '--steps', 2, timeout=200)
    assert rows[-1]['pairs'] == 400 and rows[-1]['loader_share'] < 0.05 and rows[-1]['rss_mb'] < 1500


@pytest.mark.full
def test_a_million_pairs():
    "Prepared in under 3 minutes, trained from in less than 1.5 GB, the loader under 5 % of a step of `tiny`."
    row = rehearse('--sizes', 1_000_000, timeout=3600)[-1]
    assert row['prepare_seconds'] < 180 and row['rss_mb'] < 1500 and row['loader_share'] < 0.05
