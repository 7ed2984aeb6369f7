"What the vocabulary page cannot show: other processes, full disks, any string at all, and real text where it is at hand."
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from annotated_transformer.corpora import load_corpus
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.vocabulary import (BOS, EOS, PAD, SPECIALS, UNK, BytePairTokenizer, Vocabulary, WordTokenizer,
                                              build_vocab_from_iterator, load_tokenizer, normalize, train_tokenizer, write_whole)

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get('ANNOTATED_TRANSFORMER_MULTI30K') or ROOT.parent/'shared/data/multi30k')
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason='no Multi30k: set ANNOTATED_TRANSFORMER_MULTI30K to its folder')
LANGS = 'en', 'de'


def python(code, *args, **env):
    "Run code in a fresh interpreter."
    return subprocess.run([sys.executable, '-c', code, *map(str, args)], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, **env})


@pytest.fixture(scope='module')
def pairs(): return [(p.src, p.tgt) for p in toy_ende('train', n=600)]


@pytest.fixture(scope='module', params=['bpe', 'words'])
def tokenizer(request, pairs): return train_tokenizer(request.param, pairs, LANGS, 400)


# --- text in, text out

def test_round_trip(tokenizer, pairs):
    for side, lang in enumerate(LANGS):
        texts = [pair[side] for pair in pairs]
        ids = tokenizer.encode_batch(texts, lang)
        assert ids == [tokenizer.encode(text, lang) for text in texts]
        whole = [(text, row) for text, row in zip(texts, ids) if UNK not in row]
        assert len(whole) > 100 and all(tokenizer.decode(row, lang) == text for text, row in whole)


def test_any_string_has_ids(tokenizer):
    rng = random.Random(0)
    kinds = [range(0x80), range(0x3000), range(0xd700, 0xe100), range(0x1f300, 0x1f700), range(sys.maxunicode + 1)]
    strings = [''.join(chr(rng.choice(kind)) for _ in range(rng.randrange(30))) for kind in kinds for _ in range(60)]
    for text in [*strings, 'a'*20_000, '. '*5000, '￭', '▁', '￭ ￭￭', *SPECIALS, ' '.join(SPECIALS), '<eos>'*3]:
        ids = tokenizer.encode(text, 'de')
        assert all(UNK <= i < len(tokenizer) for i in ids), repr(text)       # never PAD, BOS or EOS
        assert isinstance(tokenizer.decode(ids, 'de'), str)
        tokenizer.decode(ids, 'de').encode()                                 # and no lone surrogate comes back


def test_decode_takes_what_a_model_gives(tokenizer):
    ids = tokenizer.encode('The dog sleeps.', 'en')
    text = tokenizer.decode(ids)
    for row in ([BOS, *ids, EOS, PAD, PAD], [BOS, *ids, EOS, *ids], [PAD, *ids], torch.tensor([BOS, *ids, EOS]), tuple(ids)):
        assert tokenizer.decode(row) == text
    assert tokenizer.decode([]) == tokenizer.decode([EOS]) == tokenizer.decode([BOS, EOS, *ids]) == ''
    assert tokenizer.decode([UNK]) == '⁇'
    with pytest.raises(ValueError, match=r'not in \[0, '): tokenizer.decode([len(tokenizer)])


def test_tokens_for_pictures(tokenizer):
    ids = tokenizer.encode('The dog sleeps.', 'en')
    assert tokenizer.tokens([BOS, *ids, EOS])[::len(ids) + 1] == ['<bos>', '<eos>']
    assert len(tokenizer.tokens(ids)) == len(ids)


def test_the_vocabulary_is_that_of_the_texts_given(pairs):
    "A word that is in no training pair is unknown, however often it is asked for."
    words = train_tokenizer('words', pairs, LANGS)
    assert UNK in words.encode('Xylophone', 'en') and 'Xylophone' not in words.vocabulary
    assert words.tokens(range(4)) == train_tokenizer('bpe', pairs, LANGS).tokens(range(4)) == list(SPECIALS)


def test_words_need_a_known_language(pairs):
    words = train_tokenizer('words', pairs, LANGS)
    for lang in (None, 'fr'):
        with pytest.raises(ValueError, match='this tokenizer knows en, de'): words.encode('a', lang)
    with pytest.raises(ValueError, match="no tokenizer for 'qq'"): train_tokenizer('words', pairs, ('en', 'qq'))


def test_a_word_spelled_like_a_special_one_is_unknown():
    "Whatever cuts the words: this cutter keeps <eos> in one piece."
    words = WordTokenizer([*SPECIALS, 'a'], LANGS)
    words.splitters['en'] = lambda text: [(word, True) for word in text.split()]
    assert words.encode(' '.join(SPECIALS) + ' a b', 'en') == [UNK]*4 + [4, UNK]


def test_a_joiner_in_the_text_joins_nothing():
    words = WordTokenizer.train([('en', ['a ￭ b', 'a-￭ b'])], min_freq=1)
    assert [words.decode(words.encode(text, 'en')) for text in ('a ￭ b', 'a-￭ b')] == ['a ■ b', 'a-■ b']


@pytest.mark.parametrize('kind', ['bpe', 'words'])
def test_sizes(kind, pairs):
    for size in (120, 200, 10_000):
        assert len(train_tokenizer(kind, pairs, LANGS, size)) <= size
    assert train_tokenizer('words', pairs, LANGS, 120).langs == LANGS
    assert train_tokenizer(kind, [('1 2', '1 2')]*3, ('xx', 'xx'), 100).langs == ('xx', 'xx')


@needs_data
@pytest.mark.parametrize('pair', ['en-de', 'de-fr'])
@pytest.mark.parametrize('kind', ['bpe', 'words'])
def test_round_trips_of_real_text(kind, pair):
    corpus = load_corpus('multi30k', pair=pair, data_dir=DATA)
    tokenizer = train_tokenizer(kind, corpus['val'], corpus.langs, 100_000, min_freq=1)
    for side, lang in enumerate(corpus.langs):
        texts = [p[side] for p in corpus['val']]
        for text, ids in zip(texts, tokenizer.encode_batch(texts, lang)): assert tokenizer.decode(ids) == normalize(text)


@needs_data
def test_unseen_real_text_keeps_its_letters():
    corpus = load_corpus('multi30k', data_dir=DATA)
    tokenizer = train_tokenizer('bpe', corpus['train'][:5000], corpus.langs, 4000)
    for side in (0, 1):
        texts = [p[side] for p in corpus['test_2016_flickr']]
        ids = tokenizer.encode_batch(texts)
        assert sum(row.count(UNK) for row in ids) < 10
        assert sum(tokenizer.decode(row) == normalize(text) for text, row in zip(texts, ids)) > 990


# --- files

def test_save_and_load(tokenizer, tmp_path):
    loaded = load_tokenizer(tokenizer.save(tmp_path/'tokenizer.json'))
    assert type(loaded) is type(tokenizer) and loaded.langs == LANGS and len(loaded) == len(tokenizer)
    for text in ('The <eos> dog￭ isn\'t "old".', '', '中 ▁'): assert loaded.encode(text, 'en') == tokenizer.encode(text, 'en')
    assert loaded.save(tmp_path/'again.json').read_bytes() == (tmp_path/'tokenizer.json').read_bytes()


def test_a_file_that_is_no_tokenizer(tokenizer, tmp_path):
    good = json.loads(tokenizer.save(tmp_path/'tokenizer.json').read_bytes())
    body = next(key for key in good if key in ('tokens', 'tokenizer'))
    broken = [b'', b'{', b'\xff\xfe', b'null', b'[]', b'{"kind": null}', b'{"kind": {}}', b'\0'*50,
              *(json.dumps({k: v for k, v in good.items() if k != key}).encode() for key in ('kind', 'langs', body)),
              json.dumps(good | {body: {}}).encode(), json.dumps(good | {body: ['a', 'b']}).encode(),
              json.dumps(good | {'kind': 'letters'}).encode(), (tmp_path/'tokenizer.json').read_bytes()[:-20]]
    for data in broken:
        (tmp_path/'x.json').write_bytes(data)
        with pytest.raises(ValueError, match='x.json') as caught: load_tokenizer(tmp_path/'x.json')
        assert '\n' not in str(caught.value)
    with pytest.raises(FileNotFoundError): load_tokenizer(tmp_path/'none.json')


def test_foreign_vocabulary_order(tmp_path, pairs):
    "A vocabulary whose first four tokens are others would swap EOS for a word."
    tokens = ['<unk>', '<pad>', '<bos>', '<eos>', 'the']
    with pytest.raises(ValueError, match='must start with <pad> <bos> <eos> <unk>'): WordTokenizer(tokens, LANGS)
    state = train_tokenizer('bpe', pairs, LANGS, 200).state()
    vocab = state['tokenizer']['model']['vocab']
    vocab['<pad>'], vocab['<eos>'] = vocab['<eos>'], vocab['<pad>']
    state['tokenizer']['added_tokens'] = []
    with pytest.raises(ValueError, match='must start with'): BytePairTokenizer.from_state(state | {'langs': []})


def test_training_gives_the_same_file_in_every_process(tmp_path):
    code = '''
import sys
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.vocabulary import train_tokenizer
pairs = [(p.src, p.tgt) for p in toy_ende('train', n=400)]
for kind in ('bpe', 'words'): train_tokenizer(kind, pairs, ('en', 'de'), 300).save(f'{sys.argv[1]}/{kind}.json')
'''
    files = []
    for i, (seed, threads) in enumerate((('0', '1'), ('7', '4'))):
        (folder := tmp_path/str(i)).mkdir()
        done = python(code, folder, PYTHONHASHSEED=seed, RAYON_NUM_THREADS=threads)
        assert done.returncode == 0, done.stderr
        files.append({p.name: p.read_bytes() for p in folder.iterdir()})
    assert files[0] == files[1] and set(files[0]) == {'bpe.json', 'words.json'}


def test_a_light_import():
    "Neither tokenizer's library is loaded before it is needed."
    done = python('import sys, annotated_transformer.vocabulary\nprint({"spacy", "tokenizers", "torch"} & set(sys.modules))')
    assert done.stdout.strip() == 'set()', done.stderr


# --- written whole or not at all

def test_write_whole(tmp_path):
    path = write_whole(tmp_path/'a.txt', 'ä\n')
    assert path.read_bytes() == 'ä\n'.encode()
    write_whole(str(path), b'b')
    assert path.read_bytes() == b'b' and [p.name for p in tmp_path.iterdir()] == ['a.txt']
    with pytest.raises(UnicodeEncodeError): write_whole(path, '\ud800')
    with pytest.raises(FileNotFoundError, match='nowhere'): write_whole(tmp_path/'nowhere'/'a', b'')
    with pytest.raises(OSError): write_whole(path/'below', b'')
    (tmp_path/'folder').mkdir()
    with pytest.raises(OSError, match='folder'): write_whole(tmp_path/'folder', b'x')
    assert path.read_bytes() == b'b' and sorted(p.name for p in tmp_path.iterdir()) == ['a.txt', 'folder']


@pytest.mark.skipif(os.name == 'nt', reason='symbolic links and modes are those of POSIX')
def test_write_whole_through_a_link(tmp_path):
    (tmp_path/'real').mkdir()
    (tmp_path/'link').symlink_to(tmp_path/'real'/'a.txt')
    before = os.umask(0o027)
    try: write_whole(tmp_path/'link', 'x')
    finally: os.umask(before)
    assert (tmp_path/'link').is_symlink() and (tmp_path/'real'/'a.txt').read_text() == 'x'
    assert (tmp_path/'real'/'a.txt').stat().st_mode & 0o777 == 0o640
    with open(tmp_path/'link') as reader:
        write_whole(tmp_path/'link', 'y')
        assert reader.read() == 'x'               # who has the old file open keeps the whole of it


@pytest.mark.skipif(os.name == 'nt', reason='limits are those of POSIX')
def test_no_space_leaves_the_old_file(tmp_path):
    "A real failure of a real write: files may not grow beyond 1,000 bytes in the child."
    write_whole(tmp_path/'a.txt', 'old')
    done = python('''
import resource, signal, sys
from annotated_transformer.vocabulary import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try: write_whole(sys.argv[1], b'x'*5000)
except OSError as error: print(error)
''', tmp_path/'a.txt', PYTHONDONTWRITEBYTECODE='1')
    assert 'a.txt' in done.stdout, done.stderr
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {'a.txt': 'old'}


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    write_whole(tmp_path/'a.txt', 'old')
    child = subprocess.Popen([sys.executable, '-c', '''
import os, sys, time
from annotated_transformer import vocabulary
vocabulary.os.fsync = lambda handle: (print('written', flush=True), time.sleep(60))
vocabulary.write_whole(sys.argv[1], b'new')
''', str(tmp_path/'a.txt')], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout.readline() == 'written\n'
    child.kill()
    child.wait()
    child.stdout.close()
    assert (tmp_path/'a.txt').read_text() == 'old'


# --- torchtext's names

def test_torchtext_names():
    vocabulary = build_vocab_from_iterator([['b', 'a', 'b'], ['c', 'a', 'b']], specials=['<unk>'])
    assert vocabulary.get_itos() == ['<unk>', 'b', 'a', 'c']
    with pytest.raises(RuntimeError): vocabulary['z']
    vocabulary.set_default_index(vocabulary['<unk>'])
    assert vocabulary(['z', 'c']) == vocabulary.lookup_indices(['z', 'c']) == [0, 3]
    assert vocabulary.lookup_tokens([3, 0]) == ['c', '<unk>'] and vocabulary.lookup_token(1) == 'b'
    vocabulary.insert_token('d', 1)
    vocabulary.append_token('e')
    assert vocabulary.get_stoi() == {'<unk>': 0, 'd': 1, 'b': 2, 'a': 3, 'c': 4, 'e': 5}
    assert len(vocabulary) == 6 and 'd' in vocabulary and 'z' not in vocabulary and vocabulary.get_default_index() == 0
    assert [vocabulary[token] for token in vocabulary.get_itos()] == list(range(6))


def test_ids_do_not_depend_on_the_order_of_sentences():
    lines = [['x', 'y'], ['y', 'z'], ['a']]
    assert build_vocab_from_iterator(lines).get_itos() == build_vocab_from_iterator(lines[::-1]).get_itos() == ['y', 'a', 'x', 'z']
    assert build_vocab_from_iterator(lines, max_tokens=2, specials=['y'], special_first=False).get_itos() == ['a', 'y']
    assert len(Vocabulary()) == 0


@pytest.mark.parametrize('options, said', [
    (dict(kind='letters'), 'known are bpe, words'), (dict(vocab_size=4), 'no room'), (dict(vocab_size=-1), 'no room'),
    (dict(min_freq=0), 'at least 1'), (dict(pairs=[]), 'no sentence pairs'), (dict(vocab_size=10), 'too small')])
def test_settings_that_cannot_be(options, said, pairs):
    with pytest.raises(ValueError, match=said): train_tokenizer(**dict(dict(kind='bpe', pairs=pairs, langs=LANGS), **options))
