"Corpora: bad files, cleaning, held-out sets that do not leak, downloads, and real text if it is available."
import gzip
import hashlib
import json
import os
import re
import random
import shutil
import sys
import threading
import warnings
from collections import Counter
from dataclasses import asdict, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import islice, permutations
from pathlib import Path

import pytest

from annotated_transformer import corpora, downloads, parallel_text
from annotated_transformer.corpora import (
    CORPORA, PATH_OPTIONS, Corpus, CorpusConfig, CorpusKind, build_corpus, hold_out, hold_out_stream, load_corpus,
    source_hash)
from annotated_transformer.downloads import MULTI30K_LANGS, MULTI30K_LINES, download, multi30k_sums
from annotated_transformer.parallel_text import (
    PairStream, SeenTexts, clean, read_lines, read_tsv, rejection_reason, zip_lines)
from annotated_transformer.toy_languages import SPLITS, toy_ende

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get('ANNOTATED_TRANSFORMER_MULTI30K') or ROOT.parent/'shared/data/multi30k')
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason='no Multi30k: set ANNOTATED_TRANSFORMER_MULTI30K to its folder')


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path

def write_tsv(path, pairs):
    return write(path, ''.join(f'{src}\t{tgt}\n' for src, tgt in pairs))

def sources(pairs):
    return {src for src, _ in pairs}


# --- bad text

BAD = {'empty': (b'', 'is empty'), 'blank': (b'\n\n  \n', 'is empty'),
       'latin-1': (b'ein\nf\xfcnf\n', 'line 2: not UTF-8'),
       'nul': (b'ein\nzwei\nd\0rei\n', 'line 3: a NUL'),
       'bare return': (b'ein\nzw\rei\n', 'line 2: a carriage return'),
       'old mac': (b'ein\rzwei\r', 'line 1: a carriage return'),
       'surrogate': (b'ein\n\xed\xa0\x80\n', 'line 2: not UTF-8'),
       'truncated': ('ein\nfünf'.encode()[:-3], 'line 2: not UTF-8 .*the file may be truncated')}
OTHER = {'utf-16': ('ein\nzwei\n'.encode('utf-16'), 'is UTF-16 text'),
         'excel': (b'PK\x03\x04rest', 'zip archive or an Excel file'),
         'zstd': (b'\x28\xb5\x2f\xfdrest', 'a zstd archive')}

@pytest.mark.parametrize('kind', [kind for kind in BAD if kind != 'blank'])
@pytest.mark.parametrize('gz', [False, True])
def test_bad_files_are_named_in_streams_too(kind, gz, tmp_path):
    data, said = BAD[kind]
    path = write(tmp_path/('bad.de.gz' if gz else 'bad.de'), gzip.compress(data) if gz else data)
    good = write(tmp_path/'good.en', 'one\ntwo\n')
    for options in (dict(src=good, tgt=path), dict(src=path, tgt=good)):
        with pytest.raises(ValueError, match=r'bad\.de.*' + said):
            list(load_corpus('files', stream=True, **options)['train'])

@pytest.mark.parametrize('kind, gz', [(kind, False) for kind in BAD | OTHER] + [(kind, True) for kind in BAD])
def test_bad_files_are_named(kind, gz, tmp_path):
    data, said = (BAD | OTHER)[kind]
    path = write(tmp_path/('bad.de.gz' if gz else 'bad.de'), gzip.compress(data) if gz else data)
    good = write(tmp_path/'good.en', 'one\ntwo\n')
    for options in (dict(src=good, tgt=path), dict(src=path, tgt=good),
                    dict(src=good, tgt=good, val_src=good, val_tgt=path)):
        with pytest.raises(ValueError, match=r'bad\.de.*' + said) as caught:
            load_corpus('files', **options)['val']
        assert '\n' not in str(caught.value)
    with pytest.raises(ValueError, match=r'bad\.de'):
        load_corpus('tsv', tsv=path)['train']

def test_only_line_feeds_end_lines(tmp_path):
    odd = ['a\u2028b', 'c\u0085d', 'e\x0bf\x0cg', 'h\x1ci\u2029', 'j']
    for end in ('\n', '\r\n'):
        assert read_lines(write(tmp_path/'a.txt', end.join(odd) + end)) == odd
        assert read_lines(write(tmp_path/'a.txt', end.join(odd))) == odd
    assert read_lines(write(tmp_path/'a.txt', b'\xef\xbb\xbfeins\n\nzwei\n\n')) == ['eins', '', 'zwei', '']

def test_gzip_is_known_by_its_content_and_not_by_its_name(tmp_path):
    assert read_lines(write(tmp_path/'a.txt', gzip.compress(b'ein\r\nzwei'))) == ['ein', 'zwei']
    assert read_lines(write(tmp_path/'a.gz', b'ein\nzwei\n')) == ['ein', 'zwei']

def test_a_truncated_gzip_file_is_found_at_its_end(tmp_path):
    data = gzip.compress(b''.join(b'%d\teins\n' % i for i in range(5000)))
    for cut in (data[:-5], data[:len(data) // 2], data[:-8] + b'\0' * 8):
        with pytest.raises(ValueError, match=r'a\.tsv\.gz is not a complete gzip file'):
            list(load_corpus('tsv', tsv=write(tmp_path/'a.tsv.gz', cut), stream=True)['train'])

def test_unequal_lengths(tmp_path):
    src, tgt = write(tmp_path/'a.en', 'one\n\ntwo\nthree\n'), write(tmp_path/'a.de', 'eins\nzwei\ndrei\n')
    with pytest.raises(ValueError, match=r'a\.en has 4 lines, .*a\.de has 3; line 2 is the first'):
        load_corpus('files', src=src, tgt=tgt)['train']
    write(src, 'one\ntwo\nthree\nfour\n')
    with pytest.raises(ValueError, match=r'a\.en has 4 lines, .*a\.de has 3$'):
        load_corpus('files', src=src, tgt=tgt)['train']
    assert zip_lines(['a', 'b'], ['c', 'd']) == [('a', 'c'), ('b', 'd')]

@pytest.mark.parametrize('lines', [(5, 3), (3, 5), (1, 0)])
def test_streams_of_unequal_length(lines, tmp_path):
    src, tgt = (write(tmp_path/name, 'x\n' * n) for name, n in zip(('a.en', 'a.de'), lines))
    said = rf'a\.en has {lines[0]} lines, .*a\.de has {lines[1]}' if all(lines) else r'a\.de is empty'
    with pytest.raises(ValueError, match=said):
        list(load_corpus('files', src=src, tgt=tgt, stream=True)['train'])

@pytest.mark.parametrize('data, line', [('a\tb\nc\n', 2), ('a b\n', 1), ('a\tb\n\n\nc;d\n', 4)])
def test_a_row_with_one_column(data, line, tmp_path):
    with pytest.raises(ValueError, match=rf'x\.tsv, line {line}: one column'):
        read_tsv(write(tmp_path/'x.tsv', data))

def test_columns_beyond_the_second(tmp_path):
    def read(text): return read_tsv(write(tmp_path/'x.tsv', text))
    assert read('a\tb\r\nc\td\r\n') == read('a\tb\tCC\nc\td\tBY\t2\n') == [('a', 'b'), ('c', 'd')]
    assert read('1\ta\t2\tb\n3\tc\t4\td\n') == [('a', 'b'), ('c', 'd')]         # Tatoeba's numbers
    assert read('one\ta\t2\tb\n3\tc\t4\td\n') == [('one', 'a'), ('3', 'c')]     # the first row decides
    with pytest.raises(ValueError, match=r'x\.tsv, line 2: no numbers'):
        read('1\ta\t2\tb\n3\tc\t\td\n')
    assert read('"a"\t"b\n') == [('"a"', '"b')]                                 # quotes are text, except for Anki
    assert read('#1\tnumber one\n') == [('#1', 'number one')]

@pytest.mark.parametrize('header', ['English\tGerman', 'source_text\ttarget_text', 'EN\tde\tlicence'])
def test_a_header_is_noticed_and_left_out(header, tmp_path):
    path = write(tmp_path/'x.tsv', f'{header}\nGo!\tGeh!\n')
    with pytest.warns(UserWarning, match='looks like a header'):
        assert len(read_tsv(path)) == 2
    assert load_corpus('tsv', test_tsv=path, skip_header=True)['test'] == [('Go!', 'Geh!')]
    with pytest.raises(ValueError, match='skip_header=True is an option of corpus tsv, not of multi30k'):
        CorpusConfig('multi30k', skip_header=True)

def test_a_first_pair_is_no_header(tmp_path, recwarn):
    for pair in ('I speak German.\tIch spreche Deutsch.', 'English\tEnglisch', '1\tHi.\t2\tHallo.'):
        assert len(read_tsv(write(tmp_path/'x.tsv', f'{pair}\n{pair}\n'))) == 2
    assert not recwarn

@pytest.mark.parametrize('stream', [False, True])
def test_bad_lines_are_left_out_on_request(stream, tmp_path):
    good = [(f'word {i}', f'Wort {i}') for i in range(40)]
    rows = [f'{src}\t{tgt}'.encode() for src, tgt in good]
    table = tmp_path/'x.tsv'
    table.write_bytes(b'\n'.join([*rows[:5], b'one column', b'\xff\t\xff', b'a\0b\tc', *rows[5:]]) + b'\n')
    with pytest.raises(ValueError, match='line 6: one column'):
        list(load_corpus('tsv', tsv=table, stream=stream)['train'])
    with pytest.warns(UserWarning) as caught:
        found = load_corpus('tsv', tsv=table, stream=stream, on_error='skip', held_out=1)
        assert sorted([*found['train'], *found['val'], *found['test']]) == sorted(good)
    said = [str(warning.message) for warning in caught]
    assert any('left out 1 of 43 lines (one column: 1). The first is line 6' in text for text in said)
    assert any('left out 2 of 43 lines (not UTF-8: 1, NUL character: 1). The first is line 7' in text for text in said)
    assert {reason: n for reason, n in found.dropped.items() if n} == {'one column': 1, 'not UTF-8': 1, 'NUL character': 1}

    src, tgt = tmp_path/'x.en', tmp_path/'x.de'
    src.write_bytes(b''.join(pair[0].encode() + b'\n' for pair in good))
    tgt.write_bytes(b''.join(b'\xff\n' if i == 2 else pair[1].encode() + b'\n' for i, pair in enumerate(good)))
    with pytest.warns(UserWarning, match='x.de: left out 1 of 40 lines .* line 3: not UTF-8'):
        found = load_corpus('files', src=src, tgt=tgt, stream=stream, on_error='skip', held_out=1)
        assert sorted([*found['train'], *found['val'], *found['test']]) == sorted(good[:2] + good[3:])
    assert {reason: n for reason, n in found.dropped.items() if n} == {'not UTF-8': 1}

@pytest.mark.parametrize('stream', [False, True])
def test_a_file_of_another_encoding_is_not_left_out(stream, tmp_path):
    german = 'Der Bär frißt.\n' * 30 + 'Er geht.\n' * 10
    src, tgt = write(tmp_path/'x.en', 'It is.\n' * 40), write(tmp_path/'x.de', german.encode('latin-1'))
    with pytest.raises(ValueError, match="x.de: too many bad lines .* 30 of 40 .*it reads 'Bär', convert"):
        list(load_corpus('files', src=src, tgt=tgt, stream=stream, on_error='skip')['train'])
    with pytest.raises(ValueError, match='convert other text to UTF-8'):
        read_lines(write(tmp_path/'y.de', b'\x81\x8d\n')) # no letters of Windows-1252
    with pytest.raises(ValueError, match='y.de is UTF-16 text'):
        read_lines(write(tmp_path/'y.de', german.encode('utf-16-le'))) # without a byte order mark

def test_bad_lines_of_a_test_set_are_never_left_out(tmp_path):
    train = write(tmp_path/'train.tsv', 'a\tb\n' * 20)
    test = write(tmp_path/'test.tsv', 'a\tb\nc\n')
    corpus = load_corpus('tsv', tsv=train, test_tsv=test, on_error='skip')
    with pytest.raises(ValueError, match=r'test\.tsv, line 2: one column'):
        corpus['test']

def test_anki_exports(tmp_path):
    def read(text): return read_tsv(write(tmp_path/'x.txt', text))
    hashtag = '#separator:tab\n#tags column:3\n#metoo: I do\t#metoo: ich auch\nyes\tja\n'
    assert read(hashtag) == [('#metoo: I do', '#metoo: ich auch'), ('yes', 'ja')] # a hashtag is not a setting
    settings = ''.join(f'#{name} column:{i}\n' for i, name in ((1, 'guid'), (2, 'notetype'), (3, 'deck'), (6, 'tags')))
    rows = 'Abc12$\tBasic\tGerman\tGo!\tGeh!\teasy\nDe\tBasic\tGerman\t"a ""b"""\t"c\td"\t\n'
    assert read(settings + rows) == [('Go!', 'Geh!'), ('a "b"', 'c\td')]
    markup = '#separator:tab\n#html:true\n<b>Go!</b>\tGeh!\n"I said &quot;no&quot;."\tIch sagte „nein“.\n'
    found = [(src.strip(), tgt.strip()) for src, tgt in read(markup)]
    assert found == [('Go!', 'Geh!'), ('I said "no".', 'Ich sagte „nein“.')]
    with pytest.raises(ValueError, match=r'x\.txt, line 5: one column'):
        read(settings + 'Abc\tBasic\tGerman\tGo!\n')
    with pytest.raises(ValueError, match=r'x\.txt, line 2: .*quoted column must end on its line'):
        read('#html:false\nHello\t"Hallo\nWelt"\tTag\n')
    with pytest.raises(ValueError, match=r'x\.txt, line 2: field larger'):
        read('#html:true\n' + 140_000 * 'a' + '\tb\n')
    with pytest.raises(ValueError, match='has no rows'):
        read('#separator:tab\n')

def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match='none.en'):
        load_corpus('files', src=tmp_path/'none.en', tgt=tmp_path/'x')['train']
    with pytest.raises(FileNotFoundError, match='none.tsv'):
        load_corpus('tsv', tsv=tmp_path/'none.tsv')['val']
    with pytest.raises(FileNotFoundError, match='neither val.en.gz nor val.en'):
        load_corpus('multi30k', data_dir=tmp_path)['val']


# --- options and the registry

@pytest.mark.parametrize('options, said', [
    (dict(corpus='wmt'), 'choose one of ' + ', '.join(CORPORA)), (dict(pair='ende'), "such as 'en-de'"),
    (dict(pair='en-de-fr'), "such as 'en-de'"), (dict(pair='-de'), "such as 'en-de'"), (dict(held_out=-1), 'positive'),
    (dict(pair='english-german'), 'the codes of two languages'),
    (dict(src='a'), 'src=a is an option of corpus files, not of toy-ende'),
    (dict(corpus='multi30k', tsv='a'), 'an option of corpus tsv, not of multi30k'),
    (dict(data_dir='a'), 'an option of corpus multi30k and wmt14'),
    (dict(corpus='tsv'), 'needs tsv'), (dict(corpus='files'), 'needs src and tgt'),
    (dict(corpus='files', tgt='a'), '`src` names none, `tgt` names 1'),
    (dict(corpus='files', src='a', tgt='b', val_tgt='c'), '`val_src` names none, `val_tgt` names 1'),
    (dict(extra_src='a'), '`extra_src` names 1, `extra_tgt` names none'),
    (dict(corpus='tsv', test_tsv='a', extra_src='a', extra_tgt='b'), 'the text to train on, which is missing'),
    (dict(max_words=0), 'max_words=0 must be'), (dict(max_ratio=0.9), 'max_ratio=0.9 must be'),
    (dict(prepared='a'), 'prepared=a is an option of corpus prepared, not of toy-ende'),
    (dict(held_out=7), 'an option of corpus files and tsv'),
    (dict(corpus='files', src='a', tgt='a', val_src='a', val_tgt='b', test_src='c', test_tgt='d', held_out=7),
     'leave held_out=7 out')])
def test_options_that_do_not_fit(options, said):
    with pytest.raises(ValueError, match=said):
        CorpusConfig(**options)

@pytest.mark.parametrize('corpus, pair, said', [
    ('toy-ende', 'en-fr', "no language 'fr': it has en, de"), ('toy-ende', 'en-en', 'two different'),
    ('multi30k', 'cs-en', "no language 'cs': it has en, de, fr"), ('multi30k', 'de-de', 'two different'),
    ('copy', 'de-en', "leave pair='de-en' out"), ('wmt14', 'de-fr', 'English on one side'),
    ('wmt14', 'en-es', "no language 'es'")])
def test_unknown_languages(corpus, pair, said):
    with pytest.raises(ValueError, match=said):
        load_corpus(corpus, pair=pair)

def test_unknown_split():
    with pytest.raises(ValueError, match="no split 'test': it has train, val, test_2016_flickr"):
        load_corpus('multi30k')['test']
    with pytest.raises(ValueError, match='it has train, val, test, test_long, test_combinations'):
        load_corpus('toy-ende')['dev']

def test_configurations_survive_json():
    for config in (CorpusConfig(), CorpusConfig('multi30k', 'fr-de', data_dir='x'),
                   CorpusConfig('files', src='a', tgt=Path('b')), CorpusConfig('tsv', tsv=['a', Path('b')])):
        assert CorpusConfig(**json.loads(json.dumps(asdict(config), default=str))) == config
    assert CorpusConfig('files', src='a', tgt='b').files == [Path('a'), Path('b')]

def test_every_option_is_known():
    names = {option.name for option in fields(CorpusConfig)}
    assert set(PATH_OPTIONS) <= names
    assert {option for kind in CORPORA.values() for option in kind.options} <= names
    assert set(PATH_OPTIONS) == {option.name for option in fields(CorpusConfig) if 'Path' in str(option.type)}

def test_a_new_corpus_is_one_function_and_one_line(monkeypatch):
    def numbers(config, stream):
        pairs = [(str(i), 'x ' * i) for i in range(100)]
        return build_corpus(config, {'train': lambda: pairs[10:], 'val': lambda: pairs[:10]})
    monkeypatch.setitem(CORPORA, 'numbers', CorpusKind(numbers))
    corpus = load_corpus('numbers', max_words=12)
    assert [src for src, _ in corpus['train']] == ['10', '11', '12'] and corpus.dropped['too long'] == 87
    assert len(corpus['val']) == 10 and load_corpus(CorpusConfig('numbers')).name == 'numbers'


# --- corpora that come with the library

def test_toy_and_copy():
    toy, back = load_corpus('toy-ende'), load_corpus('toy-ende', pair='de-en')
    assert tuple(toy.splits) == tuple(SPLITS) and toy.langs == ('en', 'de') and back.langs == ('de', 'en')
    assert toy['test'] == [(pair.src, pair.tgt) for pair in toy_ende('test')] == [(en, de) for de, en in back['test']]
    assert toy['train'] == [(pair.src, pair.tgt) for pair in toy_ende('train')]
    copies = load_corpus('copy')
    assert copies.langs == ('xx', 'xx') and all(src == tgt for src, tgt in copies['test'])
    assert {split: len(copies[split]) for split in copies.splits} == {'train': 20_000, 'val': 500, 'test': 1000}
    assert len(sources(copies['train'] + copies['val'] + copies['test'])) == 21_500
    text = repr([copies[split] for split in ('val', 'test', 'train')]).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == '22ba4ba031f967ea' # as in 0.1.0

@pytest.mark.parametrize('pair', ['en-de', 'de-en'])
def test_no_toy_source_is_in_two_splits(pair):
    corpus = load_corpus('toy-ende', pair=pair)
    held_out = [sources(corpus[split]) for split in corpus.splits if split != 'train']
    assert not sources(corpus['train']) & set.union(*held_out)
    assert sum(map(len, held_out)) == len(set.union(*held_out))

def test_a_split_is_read_once_and_only_when_used():
    asked = []
    def read(split): return lambda: asked.append(split) or [(split, split)]
    corpus = Corpus('c', ('a', 'b'), {'train': read('train'), 'val': read('val'), 'test': [('x', 'y')]})
    assert corpus['val'] is corpus['val'] and corpus['test'] == [('x', 'y')] and asked == ['val']


# --- holding out

@pytest.mark.parametrize('sizes', [{'val': 30}, {'val': 30, 'test': 50}, {'val': 500, 'test': 500}, {'val': 1}])
@pytest.mark.parametrize('repeat', [1, 3, 40])
def test_hold_out(sizes, repeat):
    rng = random.Random(repeat)
    pairs = [(f's{rng.randrange(400)}', f't{i}') for i in range(400 * repeat)]
    splits = hold_out(pairs, sizes)
    assert Counter(sum(splits.values(), [])) == Counter(pairs)
    parts = [sources(part) for part in splits.values()]
    assert sum(map(len, parts)) == len(set.union(*parts)) # no source in two splits
    for name, size in sizes.items():
        wanted = min(size, len(pairs) // 10)
        assert wanted <= len(splits[name]) < wanted + 3 * repeat + 20
    kept = set(splits['train'])
    assert splits['train'] == [pair for pair in pairs if pair in kept] # the order of the file
    shuffled = rng.sample(pairs, len(pairs))
    assert {name: sources(part) for name, part in hold_out(shuffled, sizes).items()} == dict(zip(splits, parts))
    assert hold_out_stream(iter(pairs), sizes)[0] == {name: splits[name] for name in sizes}

def test_hold_out_in_one_pass_forgets_what_no_split_needs(monkeypatch):
    pairs = [(f's{i}', f't{i}') for i in range(30_000)]
    largest = []
    fill = corpora.fill_splits
    def watched(groups, sizes):
        largest.append(len(groups))
        return fill(groups, sizes)
    monkeypatch.setattr(corpora, 'fill_splits', watched)
    splits, bound = hold_out_stream(iter(pairs), {'val': 20, 'test': 30})
    assert [len(part) for part in splits.values()] == [20, 30] and max(largest) < 1300
    expected = sorted(pairs, key=lambda pair: source_hash(pair[0]))
    assert splits['val'] + splits['test'] == expected[:50] and bound == source_hash(expected[49][0]) + 1

def test_one_sentence_with_thousands_of_translations():
    pairs = [('the same', f't{i}') for i in range(5000)] + [(f's{i}', 't') for i in range(5000)]
    splits = hold_out(pairs, {'val': 10, 'test': 10})
    assert Counter(sum(splits.values(), [])) == Counter(pairs)
    assert all(len(splits[name]) in (10, 5000, *range(5001, 5011)) for name in ('val', 'test'))

def test_a_group_that_fills_one_split_leaves_candidates_for_the_next():
    others = [(f's{i}', 't') for i in range(5000)]
    lowest = min(others, key=lambda pair: source_hash(pair[0]))
    others.remove(lowest)
    splits = hold_out([(lowest[0], f't{i}') for i in range(5000)] + others, {'val': 10, 'test': 10})
    assert len(splits['val']) == 5000 and len(splits['test']) == 10 and len(splits['train']) == 4989

def test_a_growing_file_keeps_its_training_sentences_out_of_tests():
    rng = random.Random(0)
    old = [(f'{rng.random()}', 'x') for _ in range(2000)]
    new = old + [(f'{rng.random()}', 'x') for _ in range(500)]
    before, after = (hold_out(pairs, {'val': 100, 'test': 100}) for pairs in (old, new))
    assert not sources(after['val'] + after['test']) & sources(before['train'])

def test_spaces_and_unicode_forms_do_not_leak():
    pairs = [(f'{i} caf\u00e9', 'a') for i in range(200)] + [(f' {i}  cafe\u0301 ', 'b') for i in range(200)]
    splits = hold_out(pairs, {'val': 20})
    normal = {name: {corpora.normalize(src) for src, _ in part} for name, part in splits.items()}
    assert not normal['val'] & normal['train'] and len(splits['val']) == 20

def test_small_and_odd_corpora():
    assert hold_out([], {'val': 5}) == {'val': [], 'train': []}
    assert hold_out([('a', f'{i}') for i in range(50)], {'val': 5})['train'] == [] # one source goes as a whole
    assert hold_out([('a', 'b')] * 9, {'val': 5})['val'] == []                     # a tenth of 9 is 0

@pytest.mark.parametrize('stream', [False, True])
def test_held_out_sets_are_not_filtered(stream, tmp_path):
    rng = random.Random(1)
    pairs = [(f'{i} ' * (1 + rng.randrange(12)), 'x ' * (1 + rng.randrange(12))) for i in range(1000)]
    table = write_tsv(tmp_path/'x.tsv', pairs)
    filters = dict(max_words=6, max_ratio=1.5, unique=True)
    plain = load_corpus('tsv', tsv=table, held_out=80, stream=stream)
    filtered = load_corpus('tsv', tsv=table, held_out=80, stream=stream, **filters)
    assert filtered['val'] == plain['val'] and filtered['test'] == plain['test'] and len(plain['val']) == 80
    reasons = Counter(rejection_reason(pair, 6, 1.5) for pair in plain['train'])
    assert list(filtered['train']) == [pair for pair in plain['train'] if rejection_reason(pair, 6, 1.5) is None]
    assert filtered.dropped['too long'] == reasons['too long'] > 100
    assert filtered.dropped['ratio'] == reasons['ratio'] > 50
    assert any(rejection_reason(pair, 6, 1.5) for pair in filtered['val'])

def test_blank_pairs_are_neither_trained_on_nor_held_out(tmp_path):
    src, tgt = write(tmp_path/'a.en', 'one\n \nthree\n'), write(tmp_path/'a.de', 'eins\nzwei\n\n')
    val, test = write(tmp_path/'v.en', 'two\n \n'), write(tmp_path/'v.de', 'zwei\nvier\n')
    corpus = load_corpus('files', src=src, tgt=tgt, val_src=val, val_tgt=test, test_src=val, test_tgt=test)
    with pytest.warns(UserWarning, match=r'a\.en: left out 2 training pairs with a blank side'):
        assert corpus['train'] == [('one', 'eins')]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert corpus['val'] == corpus['test'] == [('two', 'zwei'), (' ', 'vier')] # as given
    with pytest.raises(ValueError, match=r'x\.tsv: no training pairs are left \(2 blank\)'):
        load_corpus('tsv', tsv=write(tmp_path/'x.tsv', '\tb\nc\t \n'))['train']
    table = write_tsv(tmp_path/'y.tsv', [(f's{i}', 't' * (i % 2)) for i in range(200)])
    half = load_corpus('tsv', tsv=table, held_out=10)
    with pytest.warns(UserWarning, match='100 training pairs'):
        assert len(half['train']) == 80
    assert all(tgt for _, tgt in half['val'] + half['test']) and half.dropped['blank'] == 100

def test_files_without_held_out_sets(tmp_path):
    lines = [f'word {i}' for i in range(100)]
    src, tgt = write(tmp_path/'a.en', '\n'.join(lines)), write(tmp_path/'a.de', '\n'.join(lines[::-1]))
    corpus = load_corpus('files', pair='is-fo', src=str(src), tgt=str(tgt), held_out=7)
    assert {name: len(corpus[name]) for name in corpus.splits} == {'train': 86, 'val': 7, 'test': 7}
    assert corpus.langs == ('is', 'fo')
    again = load_corpus('files', src=src, tgt=tgt, held_out=7)
    assert [corpus[name] for name in corpus.splits] == [again[name] for name in again.splits]
    other = write(tmp_path/'c.en', 'new\n')
    with_val = load_corpus('files', src=src, tgt=tgt, val_src=other, val_tgt=other, held_out=7)
    assert {name: len(with_val[name]) for name in ('train', 'val', 'test')} == {'train': 93, 'val': 1, 'test': 7}
    few = load_corpus('files', src=write(tmp_path/'b.en', 'one\n'), tgt=write(tmp_path/'b.de', 'eins\n'))
    assert few['train'] == [('one', 'eins')]
    with pytest.raises(ValueError, match=r'b\.en has too few pairs .* for test: add pairs, or give `test_src` and `test_tgt`'):
        few['test']

def test_tables_and_files_give_the_same_corpus(tmp_path):
    pairs = [(f's{i}', f't{i}') for i in range(300)]
    src, tgt = (write(tmp_path/f'a.{side}', ''.join(pair[side] + '\n' for pair in pairs)) for side in (0, 1))
    table = write_tsv(tmp_path/'a.tsv', pairs)
    files, tsv = load_corpus('files', src=src, tgt=tgt, held_out=20), load_corpus('tsv', tsv=table, held_out=20)
    assert [files[name] for name in ('train', 'val', 'test')] == [tsv[name] for name in ('train', 'val', 'test')]

def test_a_table_to_test_on_is_used_as_a_whole(tmp_path):
    pairs = [(f's{i}', f't{i}') for i in range(300)]
    table, other = write_tsv(tmp_path/'a.tsv', pairs), write_tsv(tmp_path/'b.tsv', pairs[:50] + pairs[:1])
    alone = load_corpus('tsv', test_tsv=other)
    assert tuple(alone.splits) == ('test',) and alone['test'] == pairs[:50] + pairs[:1]
    both = load_corpus('tsv', tsv=table, val_tsv=other, held_out=20)
    with pytest.warns(UserWarning, match=r'pairs in .*a\.tsv share a sentence with a held-out split'):
        assert not sources(both['train']) & sources(both['val'] + both['test'])
    n_shared = both.dropped['held out']
    assert 40 < n_shared <= 50 and len(both['train']) == 280 - n_shared
    assert (len(both['val']), len(both['test'])) == (51, 20)

@pytest.mark.parametrize('stream', [False, True])
def test_training_pairs_share_no_source_with_a_given_split(stream, tmp_path):
    pairs = [(f's{i}', f't{i}') for i in range(300)]
    secret = [(' s7 ', 'other'), ('s8', 't8'), ('new', 't9')]
    table, given = write_tsv(tmp_path/'a.tsv', pairs), write_tsv(tmp_path/'b.tsv', secret)
    corpus = load_corpus('tsv', tsv=table, val_tsv=given, test_tsv=given, stream=stream)
    with pytest.warns(UserWarning, match=r'2 of 300 pairs in .*a\.tsv share'):
        assert list(corpus['train']) == pairs[:7] + pairs[9:]     # between own files, only a shared source is a leak
    assert corpus.dropped['held out'] == 2 and corpus['val'] == corpus['test'] == secret
    alone = load_corpus('tsv', tsv=given, test_tsv=given, stream=stream)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r'no training pairs are left \(3 held out\)'):
        list(alone['train'])

@pytest.mark.parametrize('stream', [False, True])
def test_a_given_split_that_is_not_there_is_named(stream, tmp_path):
    table = write_tsv(tmp_path/'a.tsv', [(f's{i}', f't{i}') for i in range(30)])
    corpus = load_corpus('tsv', tsv=table, val_tsv=tmp_path/'none.tsv', test_tsv=table, stream=stream)
    with pytest.warns(UserWarning, match='val cannot be read, so training pairs are not compared with it'):
        with pytest.raises(ValueError, match=r'30 held out'):
            list(corpus['train'])


# --- cleaning

def random_dirt(seed, n=3000):
    rng = random.Random(seed)
    def side(): return ' '.join(rng.choice('ab') for _ in range(rng.randrange(7)))
    return [(side(), side()) for _ in range(n)]

@pytest.mark.parametrize('limits', [{}, dict(max_words=4), dict(max_ratio=1.5), dict(unique=True),
                                    dict(max_words=5, max_ratio=2., unique=True)])
@pytest.mark.parametrize('n_parts', [1, 7])
def test_clean_against_a_plain_loop(limits, n_parts, monkeypatch):
    pairs, dropped, before, expected = random_dirt(1) * n_parts, {}, set(), []
    monkeypatch.setattr(parallel_text, 'islice', lambda iterator, n: islice(iterator, min(n, 500)))
    for pair in pairs:
        shorter, longer = sorted(len(side.split()) for side in pair)
        if not shorter or longer > limits.get('max_words', 99) or longer > limits.get('max_ratio', 99) * shorter:
            continue
        if limits.get('unique') and pair in before:
            continue
        before.add(pair)
        expected.append(pair)
    assert list(clean(iter(pairs), dropped, **limits)) == expected
    assert sum(dropped.values()) == len(pairs) - len(expected)
    for reason, name in (('too long', 'max_words'), ('ratio', 'max_ratio'), ('duplicate', 'unique')):
        assert bool(dropped[reason]) == (name in limits)
    assert dropped['blank'] and not dropped['held out']

def test_counts_are_of_the_last_reading(tmp_path):
    table = write_tsv(tmp_path/'x.tsv', [(s or '-', t or '-') for s, t in random_dirt(2)])
    corpus = load_corpus('tsv', tsv=table, stream=True, unique=True, max_words=3)
    n = len(list(corpus['train']))
    counts = dict(corpus.dropped)
    assert len(list(corpus['train'])) == n and corpus.dropped == counts
    assert n + len(corpus['val']) + len(corpus['test']) + sum(counts.values()) == 3000
    plain = load_corpus('tsv', tsv=table, unique=True, max_words=3)
    assert plain['train'] == list(corpus['train']) and plain.dropped == counts

def test_seen_texts_cost_eight_bytes_each():
    seen = SeenTexts()
    for k in range(20):
        assert seen.add([f'{k} {i}' for i in range(1000 - 30 * k)]).all()
    for k in range(20):
        assert not seen.add([f'{k} {i}' for i in range(1000 - 30 * k)]).any()
    assert seen.add(['a', 'b', 'a']).tolist() == [True, True, False] and seen.add([]).tolist() == []
    assert sum(part.nbytes for part in seen.parts) == 8 * len(seen) == 8 * (2 + sum(1000 - 30 * k for k in range(20)))
    assert all(len(long) > 2 * len(short) for long, short in zip(seen.parts, seen.parts[1:]))
    assert all((part[1:] > part[:-1]).all() for part in seen.parts)

def test_cleaning_of_corpora_with_given_splits(monkeypatch):
    monkeypatch.setattr(corpora, 'toy_ende', lambda split: toy_ende(split, n=300))
    toy, plain = load_corpus('toy-ende', max_words=7, unique=True), load_corpus('toy-ende')
    assert toy['train'] == [p for p in plain['train'] if max(len(s.split()) for s in p) <= 7]
    assert toy['val'] == plain['val'] and not any(plain.dropped.values())
    assert toy.dropped['too long'] == 300 - len(toy['train']) and not toy.dropped['duplicate']

@pytest.mark.parametrize('stream', [False, True])
def test_a_corpus_of_which_nothing_is_left_says_why(stream, tmp_path):
    table = write(tmp_path/'s.tsv', ''.join(f'one two {i}\teins zwei {i}\n' for i in range(30)))
    corpus = load_corpus('tsv', tsv=table, max_words=2, stream=stream)
    with pytest.raises(ValueError, match=r's\.tsv: no training pairs are left \(24 too long\)'):
        list(corpus['train'])
    assert len(corpus['val']) == 3
    alone = load_corpus('tsv', tsv=write(tmp_path/'x.tsv', 20 * 'a\tb\n'), held_out=2, stream=stream)
    with pytest.raises(ValueError, match=r'x\.tsv: no training pairs are left \(there were none\)'):
        list(alone['train']) # all pairs share their source, which is held out


# --- extra training pairs

def write_extra(folder, pairs):
    names = {}
    for side, name in enumerate(('extra_src', 'extra_tgt')):
        names[name] = write(folder/name, ''.join(f'{pair[side]}\n' for pair in pairs))
    return names

@pytest.mark.parametrize('stream', [False, True])
def test_extra_pairs_come_last_and_are_cleaned_alike(stream, tmp_path):
    pairs = [(f's{i}', f't{i}') for i in range(300)]
    table = write_tsv(tmp_path/'a.tsv', pairs)
    options = dict(tsv=table, held_out=20, stream=stream)
    own = load_corpus('tsv', **options)
    known = list(own['train'])[0]
    extra = write_extra(tmp_path, [('the cat sings', 'die Katze singt'), ('x ' * 9, 'y'), ('', 'blank'), known])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        grown = load_corpus('tsv', **options, **extra, max_words=8, unique=True)
        assert list(grown['train']) == list(own['train']) + [('the cat sings', 'die Katze singt')]
    assert grown.dropped == {'blank': 1, 'too long': 1, 'ratio': 0, 'duplicate': 1, 'held out': 0}
    assert grown['val'] == own['val'] and grown['test'] == own['test'] and len(caught) == (not stream)

@pytest.mark.parametrize('split', [split for split in SPLITS if split != 'train'])
@pytest.mark.parametrize('side', [0, 1])
def test_extra_pairs_never_share_a_sentence_with_any_held_out_split(split, side, tmp_path):
    "0.1.0 looked at val and test only, and not at test_long, or at Multi30k's test_2016_flickr."
    secret = load_corpus('toy-ende')[split][7]
    pair = ['made by a model', 'von einem Modell']
    pair[side] = f' {secret[side]}'
    extra = write_extra(tmp_path, [pair, ('the cat sings', 'die Katze singt')])
    corpus = load_corpus('toy-ende', **extra)
    with pytest.warns(UserWarning, match='1 of 2 pairs .* share a sentence with a held-out split'):
        assert corpus['train'][20_000:] == [('the cat sings', 'die Katze singt')]
    assert corpus.dropped['held out'] == 1

def test_a_split_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, 'MULTI30K_LINES', dict.fromkeys(MULTI30K_LINES, 2))
    for lang in ('en', 'de'):
        for split in ('train', 'val', 'test_2016_flickr'):
            write(tmp_path/f'{split}.{lang}', f'{split} one {lang}\n{split} two {lang}\n')
    extra = write_extra(tmp_path, [('test_2016_flickr two en', 'x'), ('new', 'neu')])
    corpus = load_corpus('multi30k', data_dir=tmp_path, **extra)
    with pytest.warns(UserWarning) as caught:
        assert corpus['train'][2:] == [('new', 'neu')]
    said = [str(warning.message) for warning in caught]
    assert sum('cannot be read, so training pairs are not compared with it' in text for text in said) == 3
    assert any('1 of 2 pairs' in text for text in said)

def test_extra_pairs_for_a_corpus_too_small_to_hold_anything_out(tmp_path):
    extra = write_extra(tmp_path, [('a', 'b')])
    corpus = load_corpus('tsv', tsv=write_tsv(tmp_path/'x.tsv', [('c', 'd')]), **extra)
    with pytest.warns(UserWarning, match='too few pairs'):
        assert corpus['train'] == [('c', 'd'), ('a', 'b')]

def test_extra_files_of_unequal_length(tmp_path):
    extra = write_extra(tmp_path, [('a', 'b'), ('c', 'd')])
    write(extra['extra_tgt'], 'b\n')
    with pytest.raises(ValueError, match='extra_src has 2 lines, .*extra_tgt has 1'):
        load_corpus('copy', **extra)['train']


# --- streams

def test_streams_and_lists_read_the_same(tmp_path):
    pairs = [(f'line {i} \u2028.', f'Zeile {i}') for i in range(200)]
    src, tgt = (write(tmp_path/f'a.{k}.gz', gzip.compress('\r\n'.join(p[k] for p in pairs).encode())) for k in range(2))
    table = write(tmp_path/'a.tsv', ''.join(f'{s}\t{t}\tmore\r\n' for s, t in pairs))
    for options in (dict(corpus='files', src=src, tgt=tgt), dict(corpus='tsv', tsv=table)):
        large, small = (load_corpus(CorpusConfig(**options, held_out=20), stream) for stream in (True, False))
        assert isinstance(large['train'], PairStream) and isinstance(small['train'], list)
        for split in ('train', 'val', 'test'):
            assert list(large[split]) == list(small[split])
        assert list(large['train']) == list(large['train']) and len(large['val']) == len(large['test']) == 20
    with pytest.raises(ValueError, match='too few pairs'):
        load_corpus('tsv', tsv=write(tmp_path/'b.tsv', 'a\tb\n'), stream=True)['val']
    only = load_corpus('files', test_src=src, test_tgt=tgt, stream=True)
    assert tuple(only.splits) == ('test',) and only['test'] == pairs

def test_samples_are_fair():
    numbers = PairStream(lambda: ((f'{i}', f'{-i}') for i in range(1000)))
    assert numbers.sample(5) == numbers.sample(5) and sorted(numbers.sample(2000)) == sorted(numbers)
    draws = Counter(int(src) // 100 for seed in range(200) for src, _ in numbers.sample(20, seed))
    assert max(abs(n - 400) for n in draws.values()) < 100

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
    corpus = load_corpus('wmt14', data_dir=tmp_path, stream=True)
    assert isinstance(corpus['train'], PairStream) and list(corpus['train']) == list(corpus['train']) == pairs
    assert corpus['val'] == pairs[:7] and corpus['test'] == pairs[7:9]
    assert load_corpus('wmt14', pair='de-en', data_dir=tmp_path)['test'] == [(de, en) for en, de in pairs[7:9]]
    with pytest.raises(ValueError, match='wmt14 is large: run `annotated-transformer prepare --corpus wmt14`'):
        load_corpus('wmt14', data_dir=tmp_path)['train']
    with pytest.raises(FileNotFoundError, match='neither test'):
        load_corpus('wmt14', data_dir=tmp_path/'elsewhere')['test']
    with pytest.raises(ValueError, match='holds de and en, not en and fr'):
        load_corpus('wmt14', pair='en-fr', data_dir=folder)['test']


# --- downloads

LINES = {'en': b'Two dogs.\nA cat.\n', 'de': 'Zwei Hunde.\nEin Kätzchen.\n'.encode()}
FILES = {f'val.{lang}.gz': gzip.compress(text) for lang, text in LINES.items()}

@pytest.fixture
def net(monkeypatch, tmp_path):
    "Multi30k's mirrors and sums, replaced by a local server; `net.does[k]` says what mirror k does with each request."
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
            if 'truncate' in does: data = data[:-9]
            if does == 'corrupt': data = b'<html>sign in</html>'.ljust(len(data))
            self.wfile.write(data)
        def log_message(self, *_): pass

    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f'http://127.0.0.1:{server.server_port}'
    monkeypatch.setattr(downloads, 'MULTI30K_MIRRORS', (f'{address}/first', f'{address}/second'))
    monkeypatch.setitem(MULTI30K_LINES, 'val', 2)
    sums = multi30k_sums() | {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
    monkeypatch.setattr(downloads, 'multi30k_sums', lambda: sums)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
    Net.cached = lambda: sorted(p.name for p in (tmp_path/'cache').rglob('*') if p.is_file())
    yield Net
    server.shutdown()
    server.server_close()

needs_pooch = pytest.mark.skipif(
    find_spec('pooch') is None, reason="no pooch: pip install 'annotated_transformer[download]'")

@needs_pooch
def test_download_once(net, monkeypatch):
    corpus = load_corpus('multi30k')
    assert not net.asked                                          # nothing before it is used
    assert corpus['val'] == [('Two dogs.', 'Zwei Hunde.'), ('A cat.', 'Ein Kätzchen.')]
    assert net.asked == [('first', 'val.en.gz', 'serve'), ('first', 'val.de.gz', 'serve')]
    assert net.cached() == ['val.de.gz', 'val.en.gz']
    monkeypatch.setitem(sys.modules, 'pooch', None)               # the cache has them, so pooch is not needed
    assert load_corpus('multi30k', pair='de-en')['val'] and len(net.asked) == 2

@needs_pooch
@pytest.mark.parametrize('trouble', ['404', 'corrupt', 'truncate', 'truncate, unannounced', 'hang up'])
def test_try_again_then_another_mirror(net, trouble):
    net.does['first'] = [trouble]
    assert load_corpus('multi30k')['val']
    assert [does for _, _, does in net.asked] == [trouble, 'serve', 'serve']
    shutil.rmtree(os.environ['XDG_CACHE_HOME'])
    net.asked.clear()
    net.does['first'] = [trouble] * 4
    assert load_corpus('multi30k')['val']
    once = [('first', trouble)] * 2 + [('second', 'serve')]
    assert [(mirror, does) for mirror, _, does in net.asked] == once * 2

@needs_pooch
@pytest.mark.parametrize('trouble, said', [
    ('404', '404'), ('truncate', ''), ('hang up', ''), ('corrupt', hashlib.sha256(FILES['val.en.gz']).hexdigest())],
    ids=['not found', 'truncated', 'hung up', 'corrupt'])
def test_nothing_is_left_of_a_failed_download(net, trouble, said):
    net.does = {'first': [trouble] * 9, 'second': [trouble] * 9}
    with pytest.raises(OSError, match=f'could not download val.en.gz: .*{said}.*--data-dir') as caught:
        load_corpus('multi30k')['val']
    assert '\n' not in str(caught.value) and len(net.asked) == 4 and net.cached() == []

@needs_pooch
def test_a_damaged_cache_is_downloaded_again(net):
    load_corpus('multi30k')['val']
    [path] = Path(os.environ['XDG_CACHE_HOME']).rglob('val.en.gz')
    for data in (b'', path.read_bytes()[:-1]):
        path.write_bytes(data)
        assert len(load_corpus('multi30k')['val']) == 2
        assert path.read_bytes() == FILES['val.en.gz']

@pytest.mark.parametrize('split, lang', [('val', 'cs'), ('test', 'de')])
def test_unknown_files_of_multi30k_are_named(split, lang):
    with pytest.raises(ValueError, match=f"has no '{split}' in '{lang}': choose a split of train, val"):
        downloads.read_multi30k(split, lang)

# trial of the second version, major 1
def test_a_first_row_that_is_no_header_is_not_left_out_silently(tmp_path):
    table = write(tmp_path/'pairs.tsv', 'English\tGerman\nGo!\tGeh!\nRun!\tLauf!\n'.encode())
    test = write(tmp_path/'test.tsv', 'Stop!\tHalt!\nWait!\tWarte!\n'.encode())
    corpus = load_corpus('tsv', tsv=table, test_tsv=test, val_tsv=table, skip_header=True)
    message = r'test.tsv: the first row does not look like a header \(Stop!, Halt!\), but skip_header'
    with pytest.warns(UserWarning, match=message) as caught:
        assert corpus['test'] == [('Wait!', 'Warte!')]
    assert not [w for w in caught if 'pairs.tsv' in str(w.message)]

@needs_pooch
def test_no_network(net, monkeypatch):
    monkeypatch.setattr(downloads, 'MULTI30K_MIRRORS', ('http://127.0.0.1:9',)) # the discard port: no server listens
    with pytest.raises(OSError, match='could not download val.en.gz: 127.0.0.1:9 does not answer. Check the network .*--data-dir'):
        load_corpus('multi30k')['val']

@needs_pooch
def test_one_command_downloads_multi30k_and_shows_its_license(net, monkeypatch, tmp_path, capsys):
    from annotated_transformer.cli import main
    for split in list(MULTI30K_LINES):
        if split not in ('val', 'test_2016_flickr'):
            monkeypatch.delitem(MULTI30K_LINES, split)
    monkeypatch.setitem(MULTI30K_LINES, 'test_2016_flickr', 2)
    with monkeypatch.context() as patch:
        patch.setattr(downloads, 'MULTI30K_MIRRORS', ('http://127.0.0.1:9',))
        with pytest.raises(SystemExit):
            main(['download', '--pair', 'de-en', '--out', str(tmp_path/'captions')])
        message = r'annotated-transformer: could not download .* does not answer. Check the network .*\n' # one line
        assert re.fullmatch(message, capsys.readouterr().err)
        assert not (tmp_path/'captions').exists()
    names = [f'test_2016_flickr.{lang}.gz' for lang in ('en', 'de')]
    sums = downloads.multi30k_sums() | {name: downloads.multi30k_sums()[f'val{name[16:]}'] for name in names}
    monkeypatch.setattr(downloads, 'multi30k_sums', lambda: sums)
    for name in names:
        monkeypatch.setitem(FILES, name, FILES[f'val{name[16:]}'])
    main(['download', '--pair', 'de-en', '--out', str(tmp_path/'captions')])
    shown = ' '.join(capsys.readouterr().out.split())
    assert 'non-commercial research and education only' in shown and 'val.tsv 2 pairs' in shown
    assert '--test-tsv' in shown and 'German to English' in shown
    assert (tmp_path/'captions/val.tsv').read_text('utf-8') == 'Zwei Hunde.\tTwo dogs.\nEin Kätzchen.\tA cat.\n'
    assert 'non-commercial' in (tmp_path/'captions/LICENSE.txt').read_text('utf-8')
    assert sorted(path.name for path in (tmp_path/'captions').iterdir()) == ['LICENSE.txt', 'test_2016_flickr.tsv', 'val.tsv']
    for options, message in ({}, 'exists'), ({'--pair': 'en-cs', '--out': 'x'}, "has no language 'cs'"), ({'--pair': 'de'}, '--pair de'):
        with pytest.raises(SystemExit):
            main(['download', *(word for row in ({'--out': str(tmp_path/'captions')} | options).items() for word in row)])
        assert message in capsys.readouterr().err

@needs_pooch
def test_no_folder_for_a_download(net, tmp_path):
    write(tmp_path/'cache', b'') # a file where the folder should be
    with pytest.raises(OSError):
        load_corpus('multi30k')['val']

def test_without_pooch_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'pooch', None)
    with pytest.raises(ImportError, match=r'to download x, install pooch: pip install .*\[download\]'):
        download('x', tmp_path, '', ['http://127.0.0.1:9'])

def test_files_in_a_folder_are_counted_and_checked(net, tmp_path):
    for name, data in FILES.items():
        write(tmp_path/name, data)
    assert len(load_corpus('multi30k', data_dir=tmp_path)['val']) == 2
    write(tmp_path/'val.en.gz', gzip.compress(LINES['en'] + b'One more.\n'))
    with pytest.raises(ValueError, match=r'val\.en\.gz is corrupted'):
        load_corpus('multi30k', data_dir=tmp_path)['val']
    (tmp_path/'val.en.gz').unlink()
    write(tmp_path/'val.en', LINES['en'] + b'One more.\n')
    with pytest.raises(ValueError, match=r'val\.en has 3 lines; val of Multi30k has 2'):
        load_corpus('multi30k', data_dir=tmp_path)['val']
    write(tmp_path/'val.en', LINES['en'])
    assert len(load_corpus('multi30k', data_dir=tmp_path)['val']) == 2
    assert not net.asked

def test_every_file_has_a_sum():
    names = {f'{split}.{lang}.gz' for split in MULTI30K_LINES for lang in MULTI30K_LANGS}
    assert multi30k_sums().keys() == names and {len(bytes.fromhex(s)) for s in multi30k_sums().values()} == {32}
    assert all(downloads.MULTI30K_COMMIT in mirror for mirror in downloads.MULTI30K_MIRRORS)


# --- the real thing

@needs_data
def test_multi30k():
    for src, tgt in permutations(('en', 'de', 'fr'), 2):
        corpus = load_corpus('multi30k', pair=f'{src}-{tgt}', data_dir=DATA)
        assert len(corpus['val']) == 1014 and len(corpus['test_2016_flickr']) == 1000
    corpus, back = (load_corpus('multi30k', pair=pair, data_dir=DATA) for pair in ('en-de', 'de-en'))
    assert len(corpus['train']) == 29_000 and len(corpus['test_2017_mscoco']) == 461
    assert corpus['train'] == [(src, tgt) for tgt, src in back['train']]
    assert corpus['train'][0][0].startswith('Two young, White males')
    for split, n_shared in (('val', 1), ('test_2016_flickr', 0), ('test_2017_mscoco', 0)): # the figures of page 22
        known = {corpora.normalize(src) for src in sources(corpus['train'])}
        assert sum(corpora.normalize(src) in known for src, _ in corpus[split]) == n_shared

@needs_data
def test_sums_are_those_of_the_publisher():
    table = dict(line.split()[::-1] for line in (DATA/'SHA256SUMS').read_text().splitlines())
    assert multi30k_sums() == {name: table[name] for name in multi30k_sums()}

@needs_data
def test_a_flipped_bit(tmp_path):
    data = bytearray((DATA/'val.en.gz').read_bytes())
    data[5000] ^= 1
    write(tmp_path/'val.en.gz', bytes(data))
    shutil.copy(DATA/'val.de.gz', tmp_path)
    with pytest.raises(ValueError, match='corrupted'):
        load_corpus('multi30k', data_dir=tmp_path)['val']


# --- several files

@pytest.mark.parametrize('stream', [False, True])
def test_several_files_are_one_corpus(tmp_path, stream):
    pairs = [(f'sentence {n} .', f'Satz {n} .') for n in range(60)]
    for name, part in (('a', pairs[:20]), ('b', pairs[20:])):
        (tmp_path / f'{name}.tsv').write_text(''.join(f'{src}\t{tgt}\n' for src, tgt in part))
        for lang, side in (('en', 0), ('de', 1)):
            (tmp_path / f'{name}.{lang}').write_text(''.join(f'{pair[side]}\n' for pair in part))
    paths = {lang: [tmp_path / f'a.{lang}', str(tmp_path / f'b.{lang}')] for lang in ('en', 'de', 'tsv')}
    tables = load_corpus('tsv', tsv=paths['tsv'], held_out=5, stream=stream)
    files = load_corpus('files', src=paths['en'], tgt=paths['de'], held_out=5, stream=stream)
    for corpus in (tables, files):
        assert sorted(pair for split in ('train', 'val', 'test') for pair in corpus[split]) == sorted(pairs)
        assert len(list(corpus['val'])) == len(list(corpus['test'])) == 5
    assert list(tables['train']) == list(files['train'])
    extra = load_corpus('tsv', tsv=paths['tsv'][0], extra_src=paths['en'], extra_tgt=paths['de'], held_out=2)
    with pytest.warns(UserWarning, match='b.de|a.de'): # the copies of held-out pairs in a.en
        assert len(extra['train']) == 20 - 4 + 60 - 4


def test_files_that_do_not_go_together():
    assert CorpusConfig('tsv', tsv=['a', 'b']).tsv == (Path('a'), Path('b'))
    assert CorpusConfig('tsv', tsv=['a']).tsv == Path('a')
    assert CorpusConfig('tsv', tsv=['a', 'b']).files == [Path('a'), Path('b')]
    with pytest.raises(ValueError, match='`src` names 2, `tgt` names 1'):
        CorpusConfig('files', src=['a', 'b'], tgt='c')
