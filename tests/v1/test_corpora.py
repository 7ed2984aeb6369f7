"What the corpora page cannot show: the whole way of a download, and real text where it is at hand."
import gzip
import hashlib
import json
import os
import random
import shutil
import threading
import warnings
from collections import Counter
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import permutations
from pathlib import Path

import pytest

from annotated_transformer.v1 import corpora
from annotated_transformer.v1.corpora import (
    CORPORA, MULTI30K_LINES, SHA256, CorpusConfig, Seen, Stream, clean, download, hold_out,
    hold_out_lowest, load_corpus, read_lines, read_tsv)
from annotated_transformer.v1.toy_languages import checksum, toy_ende

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get('ANNOTATED_TRANSFORMER_MULTI30K') or ROOT.parent/'shared/data/multi30k')
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason='no Multi30k: set ANNOTATED_TRANSFORMER_MULTI30K to its folder')


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# --- bad text

BAD = {'empty': (b'', 'is empty'), 'blank': (b'\n\n  \n', 'is empty'),
       'latin-1': (b'ein\nf\xfcnf\n', 'line 2: not UTF-8'),
       'nul': (b'ein\nzwei\nd\0rei\n', 'line 3: a NUL'),
       'bare return': (b'ein\nzw\rei\n', 'line 2: a carriage return'),
       'old mac': (b'ein\rzwei\r', 'line 1: a carriage return'),
       'surrogate': (b'ein\n\xed\xa0\x80\n', 'line 2: not UTF-8'),
       'utf-16': ('ein\nzwei\n'.encode('utf-16'), 'line 1')}

@pytest.mark.parametrize('data, said', [v for k, v in BAD.items() if k != 'blank'],
                         ids=[k for k in BAD if k != 'blank'])
@pytest.mark.parametrize('gz', [False, True])
def test_bad_files_are_named_in_streams_too(data, said, gz, tmp_path):
    path = write(tmp_path/('bad.de.gz' if gz else 'bad.de'), gzip.compress(data) if gz else data)
    good = write(tmp_path/'good.en', 'one\ntwo\n')
    for options in (dict(src=good, tgt=path), dict(src=path, tgt=good)):
        with pytest.raises(ValueError, match=r'bad\.de.*' + said):
            list(load_corpus('files', on_disk=True, **options)['train'])


@pytest.mark.parametrize('data, said', BAD.values(), ids=BAD)
@pytest.mark.parametrize('gz', [False, True])
def test_bad_files_are_named(data, said, gz, tmp_path):
    path = write(tmp_path/('bad.de.gz' if gz else 'bad.de'), gzip.compress(data) if gz else data)
    good = write(tmp_path/'good.en', 'one\ntwo\n')
    before = path.read_bytes()
    for options in (dict(src=good, tgt=path), dict(src=path, tgt=good),
                    dict(src=good, tgt=good, val_src=good, val_tgt=path)):
        corpus = load_corpus('files', **options)
        with pytest.raises(ValueError, match=r'bad\.de.*' + said) as caught: corpus['val']
        assert '\n' not in str(caught.value)
    with pytest.raises(ValueError, match=r'bad\.de.*' + said): load_corpus('tsv', tsv=path)['train']
    assert path.read_bytes() == before


def test_only_line_feeds_end_lines(tmp_path):
    odd = ['a\u2028b', 'c\u0085d', 'e\x0bf\x0cg', 'h\x1ci\u2029', 'j']
    for end in ('\n', '\r\n'):
        assert read_lines(write(tmp_path/'a.txt', end.join(odd) + end)) == odd
        assert read_lines(write(tmp_path/'a.txt', end.join(odd))) == odd
    assert read_lines(write(tmp_path/'a.txt', b'\xef\xbb\xbfeins\n\nzwei\n\n')) == ['eins', '', 'zwei', '']


def test_unequal_lengths(tmp_path):
    src, tgt = write(tmp_path/'a.en', 'one\n\ntwo\nthree\n'), write(tmp_path/'a.de', 'eins\nzwei\ndrei\n')
    with pytest.raises(ValueError, match=r'a\.en has 4 lines, .*a\.de has 3; they part at line 2'):
        load_corpus('files', src=src, tgt=tgt)['train']
    write(src, 'one\ntwo\nthree\nfour\n')
    with pytest.raises(ValueError, match=r'a\.en has 4 lines, .*a\.de has 3$'):
        load_corpus('files', src=src, tgt=tgt)['train']


@pytest.mark.parametrize('data, line', [('a\tb\nc\n', 2), ('a b\n', 1), ('a\tb\n\n\nc;d\n', 4)])
def test_a_row_with_one_column(data, line, tmp_path):
    with pytest.raises(ValueError, match=rf'x\.tsv, line {line}: one column'): read_tsv(write(tmp_path/'x.tsv', data))


def test_columns_beyond_the_second(tmp_path):
    def read(text): return read_tsv(write(tmp_path/'x.tsv', text))
    assert read('a\tb\r\nc\td\r\n') == read('a\tb\tCC\nc\td\tBY\t2\n') == [('a', 'b'), ('c', 'd')]
    assert read('1\ta\t2\tb\n3\tc\t4\td\n') == [('a', 'b'), ('c', 'd')]
    assert read('one\ta\t2\tb\n3\tc\t4\td\n') == [('one', 'a'), ('3', 'c')]     # the first row says whether they count
    with pytest.raises(ValueError, match=r'x\.tsv, line 2: no numbers'): read('1\ta\t2\tb\n3\tc\t\td\n')
    assert read('"a"\t"b\n') == [('"a"', '"b')]                                      # quotes are text outside of Anki
    assert read('#1\tnumber one\n') == [('#1', 'number one')]


def test_blank_sides_are_left_out_of_training_alone(tmp_path):
    src, tgt = write(tmp_path/'a.en', 'one\n \nthree\n'), write(tmp_path/'a.de', 'eins\nzwei\n\n')
    corpus = load_corpus('files', src=src, tgt=tgt, val_src=src, val_tgt=tgt, test_src=src, test_tgt=tgt)
    with pytest.warns(UserWarning, match=r'a\.en: 2 of 3 pairs'): assert corpus['train'] == [('one', 'eins')]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert corpus['val'] == corpus['test'] == [('one', 'eins'), (' ', 'zwei'), ('three', '')]
    with pytest.raises(ValueError, match='no pair has text'):
        load_corpus('tsv', tsv=write(tmp_path/'x.tsv', '\tb\nc\t \n'))['train']


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match='none.en'):
        load_corpus('files', src=tmp_path/'none.en', tgt=tmp_path/'x')['train']
    with pytest.raises(FileNotFoundError, match='none.tsv'): load_corpus('tsv', tsv=tmp_path/'none.tsv')['val']
    with pytest.raises(FileNotFoundError, match='neither val.en.gz nor val.en'):
        load_corpus('multi30k', data_dir=tmp_path)['val']


# --- names

@pytest.mark.parametrize('options, said', [
    (dict(corpus='wmt'), 'known are ' + ', '.join(CORPORA)), (dict(pair='ende'), "such as 'en-de'"),
    (dict(pair='en-de-fr'), "such as 'en-de'"), (dict(pair='-de'), "such as 'en-de'"), (dict(held_out=-1), 'positive'),
    (dict(src='a'), 'src is given'), (dict(corpus='multi30k', tsv='a'), 'tsv is given'),
    (dict(corpus='tsv'), 'needs tsv'), (dict(corpus='files'), 'needs src and tgt'),
    (dict(corpus='files', tgt='a'), 'src and tgt go together'),
    (dict(corpus='files', src='a', tgt='b', val_tgt='c'), 'val_src and val_tgt go together'),
    (dict(max_words=0), 'max_words must be'), (dict(max_ratio=0.9), 'max_ratio must be'),
    (dict(on_disk=True), 'on_disk is for'), (dict(corpus='files', on_disk=True), 'needs src'),
    (dict(corpus='wmt14', tsv='a'), 'tsv is given'), (dict(held_out=7), 'leave held_out=7 out'),
    (dict(corpus='files', val_src='a', val_tgt='b', test_src='c', test_tgt='d', held_out=7), 'leave held_out=7 out'),
    (dict(corpus='copy', pair='de-en'), "leave pair='de-en' out")])
def test_settings_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said): CorpusConfig(**options)


@pytest.mark.parametrize('corpus, pair, said', [
    ('toy-ende', 'en-fr', "no language 'fr': known are en, de"), ('toy-ende', 'en-en', 'two different'),
    ('multi30k', 'cs-en', "no language 'cs': known are en, de, fr"), ('multi30k', 'de-de', 'two different')])
def test_unknown_languages(corpus, pair, said):
    with pytest.raises(ValueError, match=said): load_corpus(corpus, pair=pair)


def test_unknown_split():
    with pytest.raises(ValueError, match="no split 'test': known are train, val, test_2016_flickr"):
        load_corpus('multi30k')['test']
    with pytest.raises(ValueError, match='known are train, val, test, test_long, test_combinations'):
        load_corpus('toy-ende')['dev']


def test_settings_survive_json():
    for config in (CorpusConfig(), CorpusConfig('multi30k', 'fr-de', data_dir='x'),
                   CorpusConfig('files', src='a', tgt=Path('b'))):
        assert CorpusConfig(**json.loads(json.dumps(asdict(config), default=str))) == config


# --- what is put aside

def test_toy_and_copy():
    toy, back = load_corpus('toy-ende'), load_corpus('toy-ende', pair='de-en')
    assert toy['test'] == [(en, de) for de, en in back['test']] and len(toy['test']) == 500
    copies = load_corpus('copy')
    assert copies.langs == ('xx', 'xx') and all(src == tgt for src, tgt in copies['test'])
    assert copies['val'] == load_corpus('copy')['val']


def test_hold_out():
    pairs = [(f's{i % 70}', f't{i}') for i in range(200)]
    splits = hold_out(pairs, {'val': 12, 'test': 500})
    assert Counter(sum(splits.values(), [])) == Counter(pairs)
    sources = {name: {src for src, _ in part} for name, part in splits.items()}
    assert not sources['val'] & sources['train'] and not sources['test'] & (sources['train'] | sources['val'])
    assert 12 <= len(splits['val']) <= 14 and 20 <= len(splits['test']) <= 22
    assert hold_out(pairs, {'val': 12, 'test': 500}) == splits != hold_out(pairs, {'val': 12, 'test': 500}, seed=1)
    assert hold_out([], {'val': 5}) == {'val': [], 'train': []}
    assert hold_out([('a', f'{i}') for i in range(50)], {'val': 5})['train'] == []      # one source: it goes as a whole


def test_files_without_tests_of_their_own(tmp_path):
    lines = [f'word {i}' for i in range(100)]
    src, tgt = write(tmp_path/'a.en', '\n'.join(lines)), write(tmp_path/'a.de', '\n'.join(lines[::-1]))
    corpus = load_corpus('files', pair='is-fo', src=str(src), tgt=str(tgt), held_out=7)
    assert {name: len(corpus[name]) for name in corpus.splits} == {'train': 86, 'val': 7, 'test': 7}
    assert corpus.langs == ('is', 'fo')
    again = load_corpus('files', src=src, tgt=tgt, held_out=7)
    assert [corpus[name] for name in corpus.splits] == [again[name] for name in again.splits]
    with_val = load_corpus('files', src=src, tgt=tgt, val_src=src, val_tgt=tgt, held_out=7)
    assert {name: len(with_val[name]) for name in with_val.splits} == {'train': 93, 'val': 100, 'test': 7}
    few = load_corpus('files', src=write(tmp_path/'b.en', 'one\n'), tgt=write(tmp_path/'b.de', 'eins\n'))
    assert few['train'] == [('one', 'eins')]
    with pytest.raises(ValueError, match='too few pairs to put some aside for test'): few['test']


# --- cleaning

def random_dirt(seed, n=3000):
    rng = random.Random(seed)
    def side(): return ' '.join(rng.choice('ab') for _ in range(rng.randrange(7)))
    return [(side(), side()) for _ in range(n)]


@pytest.mark.parametrize('limits', [{}, dict(max_words=4), dict(max_ratio=1.5), dict(unique=True),
                                    dict(max_words=5, max_ratio=2., unique=True)])
@pytest.mark.parametrize('chunks', [1, 7])
def test_clean_against_the_plain_way(limits, chunks, monkeypatch):
    pairs, dropped, before, expected = random_dirt(1)*chunks, {}, set(), []
    monkeypatch.setattr(corpora, 'islice', lambda iterator, n: __import__('itertools').islice(iterator, min(n, 500)))
    for pair in pairs:
        short, long = sorted(len(side.split()) for side in pair)
        if not short or long > limits.get('max_words', 99) or long > limits.get('max_ratio', 99)*short: continue
        if limits.get('unique') and pair in before: continue
        before.add(pair)
        expected.append(pair)
    assert list(clean(iter(pairs), dropped, **limits)) == expected
    assert sum(dropped.values()) == len(pairs) - len(expected)
    assert all(bool(dropped[reason]) == (name in limits) for reason, name in
               (('too long', 'max_words'), ('ratio', 'max_ratio'), ('duplicate', 'unique'))) and dropped['blank']


def test_counts_are_of_the_last_reading(tmp_path):
    table = write(tmp_path/'x.tsv', ''.join(f'{s or "-"}\t{t or "-"}\n' for s, t in random_dirt(2)))
    corpus = load_corpus('tsv', tsv=table, on_disk=True, unique=True, max_words=3)
    n = len(list(corpus['train']))
    counts = dict(corpus.dropped)
    assert len(list(corpus['train'])) == n and corpus.dropped == counts == corpus['train'].dropped
    assert n + len(corpus['val']) + len(corpus['test']) + sum(counts.values()) == 3000
    plain = load_corpus('tsv', tsv=table, unique=True, max_words=3)
    assert (len(plain['train']) + len(plain['val']) + len(plain['test']) + sum(counts.values()) == 3000
            and plain.dropped == counts)


def test_what_was_seen_costs_eight_bytes():
    seen = Seen()
    for k in range(20): assert seen.new([f'{k} {i}' for i in range(1000 - 30*k)]).all()
    for k in range(20): assert not seen.new([f'{k} {i}' for i in range(1000 - 30*k)]).any()
    assert sum(part.nbytes for part in seen.parts) == 8*len(seen) == 8*sum(1000 - 30*k for k in range(20))
    assert all(len(long) > 2*len(short) for long, short in zip(seen.parts, seen.parts[1:]))
    assert all((part[1:] > part[:-1]).all() for part in seen.parts)


def test_cleaning_of_other_corpora(monkeypatch):
    monkeypatch.setattr(corpora, 'toy_ende', lambda split: toy_ende(split, n=300))
    toy, plain = load_corpus('toy-ende', max_words=7, unique=True), load_corpus('toy-ende')
    assert toy['train'] == [p for p in plain['train'] if max(len(s.split()) for s in p) <= 7]
    assert toy['val'] == plain['val'] and plain.dropped == {}
    assert toy.dropped['too long'] == 300 - len(toy['train']) and not toy.dropped['duplicate']


# --- streams

@pytest.mark.parametrize('sizes', [{'val': 30}, {'val': 30, 'test': 50}, {'val': 500, 'test': 500}, {'val': 1}])
def test_hold_out_lowest(sizes):
    for seed, repeat in ((0, 1), (1, 3)):
        rng = random.Random(seed)
        pairs = [(f's{rng.randrange(400)}', f't{i}') for i in range(400*repeat)]
        splits, bound = hold_out_lowest(iter(pairs), sizes)
        train = [pair for pair in pairs if checksum(pair[0]) >= bound]
        assert Counter(train + sum(splits.values(), [])) == Counter(pairs)
        sources = [{src for src, _ in part} for part in (train, *splits.values())]
        assert sum(map(len, sources)) == len(set.union(*sources))                   # no source in two of them
        for name, size in sizes.items(): assert abs(len(splits[name]) - min(size, len(pairs)//10)) < 12*repeat
        rng.shuffle(pairs)
        assert hold_out_lowest(pairs, sizes)[1] == bound


def test_streams_and_lists_read_the_same(tmp_path):
    pairs = [(f'line {i} \u2028.', f'Zeile {i}') for i in range(200)]
    src, tgt = (write(tmp_path/f'a.{k}.gz', gzip.compress('\r\n'.join(p[k] for p in pairs).encode())) for k in range(2))
    table = write(tmp_path/'a.tsv', ''.join(f'{s}\t{t}\tmore\r\n' for s, t in pairs))
    for options in (dict(corpus='files', src=src, tgt=tgt), dict(corpus='tsv', tsv=table)):
        large, small = (load_corpus(CorpusConfig(**options, on_disk=on_disk, held_out=20)) for on_disk in (True, False))
        assert isinstance(large['train'], Stream) and isinstance(small['train'], list)
        for corpus in (large, small):
            assert sorted([*corpus['train'], *corpus['val'], *corpus['test']]) == sorted(pairs)
        assert [len(large[part]) for part in ('val', 'test')] == [20, 20]
    with pytest.raises(ValueError, match='too few pairs'):
        load_corpus('tsv', tsv=write(tmp_path/'b.tsv', 'a\tb\n'), on_disk=True)['val']
    only = load_corpus('files', test_src=src, test_tgt=tgt, on_disk=True)
    assert tuple(only.splits) == ('test',) and only['test'] == pairs


@pytest.mark.parametrize('lines', [(5, 3), (3, 5), (1, 0)])
def test_streams_of_unequal_length(lines, tmp_path):
    src, tgt = (write(tmp_path/name, 'x\n'*n) for name, n in zip(('a.en', 'a.de'), lines))
    said = rf'a\.en has {lines[0]} lines, .*a\.de has {lines[1]}' if all(lines) else r'a\.de is empty'
    with pytest.raises(ValueError, match=said): list(load_corpus('files', src=src, tgt=tgt, on_disk=True)['train'])


@pytest.mark.parametrize('on_disk', [False, True])
@pytest.mark.parametrize('part', ['train', 'val'])
def test_a_corpus_of_which_nothing_is_left_says_why(on_disk, part, tmp_path):
    table = write(tmp_path/'s.tsv', ''.join(f'one two {i}\teins zwei {i}\n' for i in range(30)))
    corpus = load_corpus('tsv', tsv=table, max_words=2, on_disk=on_disk)
    with pytest.raises(ValueError, match=r's\.tsv: .* passes the cleaning \(30 too long dropped\)'): list(corpus[part])


def test_blank_lines_of_further_text_are_counted_in_it(tmp_path):
    own = [write(tmp_path/f'a.{lang}', ''.join(f'{lang} {i}\n' for i in range(20))) for lang in ('en', 'de')]
    more = [write(tmp_path/f'e.{lang}', text) for lang, text in (('en', 'x\n\nz\n'), ('de', 'y\ny\ny\n'))]
    corpus = load_corpus('files', src=own[0], tgt=own[1], extra_src=more[0], extra_tgt=more[1], unique=True)
    with pytest.warns(UserWarning, match=r'e\.en: 1 of 3 pairs are blank'): pairs = corpus['train']
    assert pairs[-2:] == [('x', 'y'), ('z', 'y')] and corpus.dropped['blank'] == 1


def test_a_cut_gzip_file_is_found_at_its_end(tmp_path):
    data = gzip.compress(b''.join(b'%d\teins\n' % i for i in range(5000)))
    for cut in (data[:-5], data[:len(data)//2], data[:-8] + b'\0'*8):
        with pytest.raises(ValueError, match='no whole gzip file'):
            list(load_corpus('tsv', tsv=write(tmp_path/'a.tsv.gz', cut), on_disk=True)['train'])


@pytest.mark.parametrize('kind', ['parquet', 'jsonl'])
@pytest.mark.parametrize('nested', [False, True])
def test_wmt14_from_a_folder(kind, nested, tmp_path):
    datasets = pytest.importorskip('datasets', reason="no datasets: pip install 'annotated_transformer[large]'")
    folder = tmp_path/'de-en' if nested else tmp_path
    folder.mkdir(exist_ok=True)
    pairs = [(f'line {i}', f'Zeile {i}') for i in range(2500)]
    for name, part in (('train-00000-of-00002', pairs[:2000]), ('train-00001-of-00002', pairs[2000:]),
                       ('validation-00000-of-00001', pairs[:7]), ('test', pairs[7:9])):
        rows = datasets.Dataset.from_list([{'translation': {'de': de, 'en': en}} for en, de in part])
        rows.to_parquet(folder/f'{name}.parquet') if kind == 'parquet' else rows.to_json(folder/f'{name}.jsonl')
    corpus = load_corpus('wmt14', data_dir=tmp_path)
    assert (list(corpus['train']) == list(corpus['train']) == pairs
            and corpus['val'] == pairs[:7] and corpus['test'] == pairs[7:9])
    assert load_corpus('wmt14', pair='de-en', data_dir=tmp_path)['test'] == [(de, en) for en, de in pairs[7:9]]
    with pytest.raises(ValueError, match='English on one side'): load_corpus('wmt14', pair='de-fr', data_dir=tmp_path)
    with pytest.raises(ValueError, match="no language 'es'"): load_corpus('wmt14', pair='en-es', data_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match='neither test'):
        load_corpus('wmt14', data_dir=tmp_path/'elsewhere')['test']


# --- downloads

LINES = {'en': b'Two dogs.\nA cat.\n', 'de': 'Zwei Hunde.\nEine Kätzchen.\n'.encode()}
FILES = {f'val.{lang}.gz': gzip.compress(text) for lang, text in LINES.items()}


@pytest.fixture
def net(monkeypatch, tmp_path):
    """Multi30k's mirrors and sums, replaced by a server of ours;
    `net.does[k]` says what mirror k does with each request."""
    class Net:
        does, asked = {'first': [], 'second': []}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            mirror, name = self.path.strip('/').split('/')
            does = Net.does[mirror].pop(0) if Net.does[mirror] else 'serve'
            Net.asked.append((mirror, name, does))
            if does == '404': return self.send_error(404)
            if does == 'hang up': return self.connection.close()
            data = FILES[name]
            self.send_response(200)
            if does != 'truncate, unannounced': self.send_header('Content-Length', str(len(data)))
            self.end_headers()
            self.wfile.write(data[:-9] if 'truncate' in does
                             else b'<html>sign in</html>'.ljust(len(data)) if does == 'corrupt' else data)
        def log_message(self, *_): pass

    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Net.address, Net.does, Net.asked = f'http://127.0.0.1:{server.server_port}', {'first': [], 'second': []}, []
    monkeypatch.setattr(corpora, 'MIRRORS', (f'{Net.address}/first', f'{Net.address}/second'))
    monkeypatch.setitem(MULTI30K_LINES, 'val', 2)
    for name, data in FILES.items(): monkeypatch.setitem(SHA256, name, hashlib.sha256(data).hexdigest())
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
    Net.cached = lambda: sorted(p.name for p in (tmp_path/'cache').rglob('*') if p.is_file())
    yield Net
    server.shutdown()
    server.server_close()


def test_download_once(net):
    corpus = load_corpus('multi30k')
    assert not net.asked                                          # nothing before it is asked for
    assert corpus['val'] == [('Two dogs.', 'Zwei Hunde.'), ('A cat.', 'Eine Kätzchen.')]
    assert net.asked == [('first', 'val.en.gz', 'serve'), ('first', 'val.de.gz', 'serve')]
    assert net.cached() == ['val.de.gz', 'val.en.gz']
    load_corpus('multi30k', pair='de-en')['val']
    assert len(net.asked) == 2                                    # the cache has them


@pytest.mark.parametrize('trouble', ['404', 'corrupt', 'truncate', 'truncate, unannounced', 'hang up'])
def test_retry_then_another_mirror(net, trouble):
    net.does['first'] = [trouble]
    assert load_corpus('multi30k')['val']
    assert [does for _, _, does in net.asked] == [trouble, 'serve', 'serve']
    shutil.rmtree(os.environ['XDG_CACHE_HOME'])
    net.asked.clear()
    net.does['first'] = [trouble]*4
    assert load_corpus('multi30k')['val']
    assert ([(mirror, does) for mirror, _, does in net.asked]
            == [('first', trouble)]*2 + [('second', 'serve')] + [('first', trouble)]*2 + [('second', 'serve')])


@pytest.mark.parametrize('trouble, said', [
    ('404', 'HTTP Error 404'), ('truncate', 'bytes came'), ('hang up', ''),
    ('corrupt', 'val.en.gz is corrupted: its SHA-256 is [0-9a-f]{64}, '
                f'expected {hashlib.sha256(FILES["val.en.gz"]).hexdigest()}')])
def test_nothing_is_left_of_a_failed_download(net, trouble, said):
    net.does = {'first': [trouble]*9, 'second': [trouble]*9}
    with pytest.raises(OSError, match=f'could not download val.en.gz: .*{said}.*--data-dir') as caught:
        load_corpus('multi30k')['val']
    assert '\n' not in str(caught.value) and len(net.asked) == 4
    assert net.cached() == []


def test_a_spoilt_cache_is_fetched_again(net):
    load_corpus('multi30k')['val']
    [path] = Path(os.environ['XDG_CACHE_HOME']).rglob('val.en.gz')
    for data in (b'', path.read_bytes()[:-1]):
        path.write_bytes(data)
        assert len(load_corpus('multi30k')['val']) == 2
        assert path.read_bytes() == FILES['val.en.gz']


def test_network_refused(net, monkeypatch):
    monkeypatch.setattr(corpora, 'MIRRORS', ('http://127.0.0.1:9/{}',))      # nobody listens on the discard port
    with pytest.raises(OSError, match='could not download val.en.gz: .*--data-dir'): load_corpus('multi30k')['val']


def test_no_space_for_a_download(net, tmp_path):
    write(tmp_path/'cache', b'')                                   # a file where the folder should be
    with pytest.raises(OSError): load_corpus('multi30k')['val']


def test_interrupted_download(net, tmp_path, monkeypatch):
    def interrupt(*_, **__): raise KeyboardInterrupt
    monkeypatch.setattr(corpora, 'get', interrupt)
    with pytest.raises(KeyboardInterrupt): download('x', tmp_path/'x', '', ['http://nowhere'])
    assert not list(tmp_path.iterdir())


def test_counted_and_summed(net, tmp_path):
    for name, data in FILES.items(): write(tmp_path/name, data)
    assert len(load_corpus('multi30k', data_dir=tmp_path)['val']) == 2
    write(tmp_path/'val.en.gz', gzip.compress(LINES['en'] + b'One more.\n'))
    with pytest.raises(ValueError, match=r'val\.en\.gz is corrupted'): load_corpus('multi30k', data_dir=tmp_path)['val']
    (tmp_path/'val.en.gz').unlink()
    write(tmp_path/'val.en', LINES['en'] + b'One more.\n')
    with pytest.raises(ValueError, match=r'val\.en has 3 lines; val of Multi30k has 2'):
        load_corpus('multi30k', data_dir=tmp_path)['val']
    write(tmp_path/'val.en', LINES['en'])
    assert len(load_corpus('multi30k', data_dir=tmp_path)['val']) == 2
    assert not net.asked


# --- the real thing

@needs_data
def test_multi30k():
    for src, tgt in permutations(('en', 'de', 'fr'), 2):
        corpus = load_corpus('multi30k', pair=f'{src}-{tgt}', data_dir=DATA)
        assert len(corpus['val']) == 1014 and len(corpus['test_2016_flickr']) == 1000
    corpus, back = (load_corpus('multi30k', pair=pair, data_dir=DATA) for pair in ('en-de', 'de-en'))
    assert len(corpus['train']) == 29_000 and len(corpus['test_2017_mscoco']) == 461
    assert corpus['train'] == [(src, tgt) for tgt, src in back['train']]
    assert (corpus['train'][0][0].startswith('Two young, White males')
            and corpus['train'][0][1].startswith('Zwei junge weiße Männer'))


@needs_data
def test_sums_are_upstreams():
    table = dict(line.split()[::-1] for line in (DATA/'SHA256SUMS').read_text().splitlines())
    assert SHA256 == {name: table[name] for name in SHA256}
    for path in DATA.glob('*.gz'):
        if path.name in SHA256: assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[path.name]


@needs_data
def test_a_flipped_bit(tmp_path):
    data = bytearray((DATA/'val.en.gz').read_bytes())
    data[5000] ^= 1
    write(tmp_path/'val.en.gz', bytes(data))
    shutil.copy(DATA/'val.de.gz', tmp_path)
    with pytest.raises(ValueError, match='corrupted'): load_corpus('multi30k', data_dir=tmp_path)['val']


def test_a_hashtag_at_the_beginning_is_a_sentence_and_no_setting(tmp_path):
    rows = '#separator:tab\n#tags column:3\n#metoo: I do\t#metoo: ich auch\nyes\tja\n'
    assert read_tsv(write(tmp_path/'x.txt', rows)) == [('#metoo: I do', '#metoo: ich auch'), ('yes', 'ja')]


def test_an_anki_export_with_notes_before_its_sentences(tmp_path):
    settings = ''.join(f'#{name} column:{i}\n' for i, name in ((1, 'guid'), (2, 'notetype'), (3, 'deck'), (6, 'tags')))
    rows = 'Abc12$\tBasic\tGerman\tGo!\tGeh!\teasy\nDe\tBasic\tGerman\t"a ""b"""\t"c\td"\t\n'
    assert read_tsv(write(tmp_path/'x.txt', settings + rows)) == [('Go!', 'Geh!'), ('a "b"', 'c\td')]
    with pytest.raises(ValueError, match=r'x\.txt, line 5: one column'):
        read_tsv(write(tmp_path/'x.txt', settings + 'Abc\tBasic\tGerman\tGo!\n'))
    with pytest.raises(ValueError, match=r'x\.txt, line 2: .*quoted column must end on its line'):
        read_tsv(write(tmp_path/'x.txt', '#html:false\nHello\t"Hallo\nWelt"\tTag\n'))


def test_a_long_field_of_an_anki_export_is_named(tmp_path):
    with pytest.raises(ValueError, match=r'x\.txt, line 2: field larger'):
        read_tsv(write(tmp_path/'x.txt', '#html:true\n' + 140_000*'a' + '\tb\n'))


def test_one_source_sentence_alone_cannot_be_held_out(tmp_path):
    with pytest.raises(ValueError): load_corpus('tsv', tsv=write(tmp_path/'x.tsv', 20*'a\tb\n'), held_out=2)['train']
