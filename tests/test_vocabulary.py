"Tokenizers beyond what their page shows: any string, other processes, damaged files, real text."
import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from annotated_transformer import vocabulary
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.vocabulary import (
    BOS, EOS, PAD, SPECIALS, UNK, BytePairTokenizer, SentencePieceTokenizer, WordTokenizer, add_joiners, join_words,
    load_tokenizer, normalize, open_sentencepiece, spacy_splitter, train_tokenizer)

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get('ANNOTATED_TRANSFORMER_MULTI30K') or ROOT.parent / 'shared/data/multi30k')
needs_data = pytest.mark.skipif(not DATA.is_dir(),
                                reason='no Multi30k: set ANNOTATED_TRANSFORMER_MULTI30K to its folder')
LANGS = ('en', 'de')


def python(code, *args, **env):
    "Run code in a fresh interpreter."
    return subprocess.run([sys.executable, '-c', code, *map(str, args)], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, **env})


def real_sentences(split, lang):
    "The first lines of Multi30k in one language."
    with gzip.open(DATA / f'{split}.{lang}.gz', 'rt', encoding='utf-8') as file:
        return file.read().splitlines()[:1000]


@pytest.fixture(scope='module')
def pairs():
    return [(pair.src, pair.tgt) for pair in toy_ende('train', n=600)]


@pytest.fixture(scope='module', params=['bpe', 'words'])
def tokenizer(request, pairs):
    return train_tokenizer(request.param, pairs, LANGS, 400)


@pytest.fixture(scope='module')
def sentencepiece_tokenizer(pairs):
    pytest.importorskip('sentencepiece')
    import io

    from sentencepiece import SentencePieceTrainer
    file = io.BytesIO()
    SentencePieceTrainer.train(sentence_iterator=(text for pair in pairs for text in pair), model_writer=file,
                               vocab_size=300, hard_vocab_limit=False, character_coverage=1.0, minloglevel=2)
    model = open_sentencepiece(file.getvalue())
    pieces = [model.id_to_piece(i) for i in range(len(model)) if not model.is_control(i) and not model.is_unknown(i)]
    return SentencePieceTokenizer([file.getvalue()] * 2, [[*pieces, '>>de<<']] * 2, LANGS)


# --- text in, text out

def test_round_trip(tokenizer, pairs):
    for side, lang in enumerate(LANGS):
        texts = [pair[side] for pair in pairs]
        rows = tokenizer.encode_batch(texts, lang)
        assert rows == [tokenizer.encode(text, lang) for text in texts]
        known = [(text, row) for text, row in zip(texts, rows) if UNK not in row]
        assert len(known) > 100
        assert all(tokenizer.decode(row) == text for text, row in known)


def test_any_string_is_accepted(tokenizer):
    "No string raises an error or gives PAD, BOS or EOS; only white space gives no ids."
    rng = random.Random(0)
    ranges = [range(0x80), range(0x3000), range(0xd700, 0xe100), range(0x1f300, 0x1f700), range(sys.maxunicode + 1)]
    strings = [''.join(chr(rng.choice(r)) for _ in range(rng.randrange(30))) for r in ranges for _ in range(60)]
    strings += ['', ' \n', 'a' * 20_000, '. ' * 5000, '￭', '▁', '￭ ￭￭', *SPECIALS, ' '.join(SPECIALS), '<eos>' * 3]
    for text in strings:
        ids = tokenizer.encode(text, 'de')
        assert all(UNK <= i < len(tokenizer) for i in ids), repr(text)
        assert (ids == []) == (text.strip() == ''), repr(text)
        tokenizer.decode(ids).encode() # no lone surrogate comes back


def test_decode_accepts_what_a_model_returns(tokenizer):
    ids = tokenizer.encode('The dog sleeps.', 'en')
    text = tokenizer.decode(ids)
    for row in ([BOS, *ids, EOS, PAD, PAD], [BOS, *ids, EOS, *ids], [PAD, *ids],
                torch.tensor([BOS, *ids, EOS]), tuple(ids)):
        assert tokenizer.decode(row) == text
    assert tokenizer.decode([]) == tokenizer.decode([EOS]) == tokenizer.decode([BOS, EOS, *ids]) == ''
    assert tokenizer.decode([UNK]) == '⁇'
    for outside in (len(tokenizer), -1):
        with pytest.raises(ValueError, match=rf'id {outside} is not in \[0, {len(tokenizer)}\)'):
            tokenizer.decode([outside])


def test_tokens_of_ids(tokenizer):
    ids = tokenizer.encode('The dog sleeps.', 'en')
    tokens = tokenizer.tokens([BOS, *ids, EOS])
    assert tokens[0] == '<bos>' and tokens[-1] == '<eos>' and len(tokens) == len(ids) + 2
    assert tokenizer.tokens(range(4)) == list(SPECIALS)


def test_normal_form(tokenizer):
    assert normalize('cafe\u0301\u00a0 au\tlait\u2028') == 'caf\u00e9 au lait'
    assert normalize('\ud83d alone') == '\ufffd alone' and normalize(' \n ') == ''
    for code in range(sys.maxunicode + 1):
        if chr(code).isspace():
            assert (tokenizer.encode(f'The{chr(code)}{chr(code)}dog ', 'en')
                    == tokenizer.encode('The dog', 'en')), hex(code)


def test_byte_pairs_of_unusual_text(pairs):
    bpe = train_tokenizer('bpe', pairs, LANGS, 400)
    assert bpe.encode('a中文b').count(UNK) == 1 # neighbouring unknown characters are one token
    assert ' ' not in bpe.decode(bpe.encode('a▁b')) # a literal ▁ is not a space
    texts = [f'{i} dogs' for i in range(2500)]
    assert bpe.encode_batch(texts) == [bpe.encode(text) for text in texts]


def test_known_words_are_looked_up(pairs, monkeypatch):
    "In any order, and after the tokenizer has started anew, the ids are those of the library for the whole text."
    bpe = train_tokenizer('bpe', pairs, LANGS, 400)
    texts = [text for pair in pairs for text in pair]
    texts += ['<eos> <pad>dog', 'cafe\u0301\u00a0 au\tlait', 'a▁b ▁ a中文b. (x)!?', ' ', '\ud83d dog', "don't, 3.5\x1ca\x85b",
              'e\u0301\u0301 \u0301x', '\ufeffThe \u200b dog\u3000sleeps']
    whole = [bpe.model.encode(vocabulary.replace_surrogates(text), add_special_tokens=False).ids for text in texts]
    assert bpe.encode_batch(texts) == whole and bpe.encode_batch(texts[::-1]) == whole[::-1]
    words = {word for text in texts for word in vocabulary.normalized_words(text)}
    assert bpe.known.keys() == words and bpe.n_characters == sum(map(len, words))
    asked = []
    monkeypatch.setattr(bpe, 'model', Recorder(bpe.model, asked))
    assert bpe.encode_batch([*texts, 'unheard']) == [*whole, bpe.encode('unheard')]
    assert sum(asked, []) == ['unheard']
    monkeypatch.setattr(bpe, 'max_characters', 100)
    for start in range(0, len(texts), 10): # forgets, again and again
        assert bpe.encode_batch(texts[start:start + 10]) == whole[start:start + 10]
        assert bpe.n_characters <= 100 and sum(map(len, bpe.known)) == bpe.n_characters


class Recorder:
    "A tokenizer of the library that notes what it is asked for."
    def __init__(self, model, asked):
        self.model = model
        self.asked = asked

    def encode_batch_fast(self, texts, **options):
        self.asked.append(texts)
        return self.model.encode_batch_fast(texts, **options)


# --- words

def test_words_are_those_of_the_training_texts(pairs):
    words = train_tokenizer('words', pairs, LANGS)
    assert UNK in words.encode('Xylophone', 'en') and 'Xylophone' not in words.ids
    reordered = WordTokenizer.train([('en', [src for src, _ in pairs[::-1]]), ('de', [tgt for _, tgt in pairs[::-1]])])
    assert words.vocabulary == reordered.vocabulary # ids do not depend on the order of the sentences
    assert words.vocabulary[:50] == train_tokenizer('words', pairs, LANGS, 50).vocabulary # the most common words


def test_words_need_a_known_language(pairs):
    words = train_tokenizer('words', pairs, LANGS)
    for lang in (None, 'fr'):
        with pytest.raises(ValueError, match='this tokenizer knows en, de'):
            words.encode('a', lang)
    with pytest.raises(ValueError, match="no tokenizer for 'qq'"):
        train_tokenizer('words', pairs, ('en', 'qq'))


def test_rare_words_are_unknown():
    texts = [('en', ['a a b', 'b a c'])]
    assert WordTokenizer.train(texts).vocabulary == [*SPECIALS, 'a', 'b']
    assert WordTokenizer.train(texts, min_freq=1).vocabulary == [*SPECIALS, 'a', 'b', 'c']
    assert WordTokenizer.train(texts, vocab_size=5).vocabulary == [*SPECIALS, 'a']


def test_a_word_spelled_like_a_special_token_is_unknown(monkeypatch):
    words = WordTokenizer([*SPECIALS, 'a'], LANGS)
    words.splitters['en'] = lambda text: [(word, True) for word in text.split()] # keeps <eos> whole
    assert words.encode(' '.join(SPECIALS) + ' a b', 'en') == [UNK] * 4 + [4, UNK]
    monkeypatch.setattr(vocabulary, 'spacy_splitter', lambda lang: words.splitters['en'])
    trained = WordTokenizer.train([('en', ['a <eos> <eos> a'])])
    assert trained.vocabulary == [*SPECIALS, 'a']


def test_a_literal_joiner_joins_nothing():
    words = WordTokenizer.train([('en', ['a ￭ b', 'a-￭ b'])], min_freq=1)
    assert [words.decode(words.encode(text, 'en')) for text in ('a ￭ b', 'a-￭ b')] == ['a ■ b', 'a-■ b']


@pytest.mark.parametrize('lang, text', [
    ('en', '"Don\'t!" she cried -- and left.'), ('en', 'The dogs\' bowl cost $4.50 (really?).'),
    ('en', 'rock \'n\' roll, a 10-year-old; e.g. this'), ('de', '„Geht\'s?“, fragte er – leise.'),
    ('de', 'Die U-Bahn-Station (Nr. 3) ist »neu«.'), ('fr', '« L\'eau qu\'il a, c\'est à l\'ami », dit-elle.'),
    ('fr', 'Aujourd\'hui, y a-t-il quelqu\'un ?'), ('es', '¿Qué dijo? —¡Nada!, contestó él.')])
def test_joiners_remember_every_space(lang, text):
    assert join_words(add_joiners(spacy_splitter(lang)(text))) == text


def test_joiners_stand_on_punctuation():
    words = [('T', False), ('-', False), ('shirt', True), ('do', False), ("n't", True)]
    assert add_joiners(words) == ['T', '￭-￭', 'shirt', 'do', "￭n't"]


@pytest.mark.slow
def test_spacy_does_not_grow_for_ever(monkeypatch):
    import spacy
    made = []
    blank = spacy.blank

    def noted(lang):
        made.append(blank(lang))
        return made[-1]
    monkeypatch.setattr(spacy, 'blank', noted)
    split = spacy_splitter('en')
    for i in range(0, 110_000, 1000):
        split(' '.join(f'w{i + j}' for j in range(1000)))
    assert split('two words') == [('two', True), ('words', False)]
    assert len(made) == 2 and len(made[1].vocab) < 50_000


def test_without_spacy(monkeypatch):
    monkeypatch.setitem(sys.modules, 'spacy', None)
    with pytest.raises(ImportError, match='pip install spacy'):
        spacy_splitter('en')


# --- sizes and settings

@pytest.mark.parametrize('kind', ['bpe', 'words'])
def test_sizes(kind, pairs):
    for size in (120, 200, 10_000):
        assert len(train_tokenizer(kind, pairs, LANGS, size)) <= size
    assert train_tokenizer('words', pairs, LANGS, 120).langs == LANGS
    assert train_tokenizer(kind, [('1 2', '1 2')] * 3, ('xx', 'xx'), 100).langs == ('xx', 'xx')


@pytest.mark.parametrize('options, said', [
    (dict(kind='letters'), 'known are bpe, words'), (dict(vocab_size=4), 'must exceed'),
    (dict(vocab_size=-1), 'must exceed'), (dict(min_freq=0), 'min_freq=0 must be at least 1'),
    (dict(pairs=[]), 'no sentence pairs'), (dict(vocab_size=10), 'vocab_size=10 is too small')])
def test_unusable_settings(options, said, pairs):
    with pytest.raises(ValueError, match=said):
        train_tokenizer(**dict(dict(kind='bpe', pairs=pairs, langs=LANGS), **options))


# --- SentencePiece

def test_sentencepiece(sentencepiece_tokenizer, pairs):
    tokenizer = sentencepiece_tokenizer
    for src, tgt in pairs[:20]:
        assert tokenizer.decode(tokenizer.encode(tgt, 'de')) == tgt
        assert tokenizer.encode(src) == tokenizer.encode(src, 'en') # the source language by default
    tokens = tokenizer.tokens(tokenizer.encode('>>de<< the dog'))
    assert tokens[0] == '>>de<<' and ''.join(tokens[1:]).replace('▁', ' ').strip() == 'the dog'
    for text in ('>>', '<<>>', '>><<', '>>de', 'a >>de<<', '', ' ', '\ud83d', '<eos>'):
        assert all(UNK <= i < len(tokenizer) for i in tokenizer.encode(text)), text
    with pytest.raises(ValueError, match="unknown language 'fr': this tokenizer knows en, de"):
        tokenizer.encode('a', 'fr')


def test_sentencepiece_with_a_vocabulary_for_each_language(sentencepiece_tokenizer):
    data = sentencepiece_tokenizer.files[0]
    pieces = sentencepiece_tokenizer.vocabularies[0]
    own = SentencePieceTokenizer([data] * 2, [pieces[:60], pieces[40:100]], LANGS)
    assert len(own) == len(SPECIALS) + 100
    for piece in pieces[:100]:
        assert (piece in own.ids[0], piece in own.ids[1]) == (piece in pieces[:60], piece in pieces[40:100])
        assert own.token(own.ids[0].get(piece, own.ids[1].get(piece))) == piece
    only_target = [piece for piece in own.vocabularies[1] if piece not in own.vocabularies[0] and piece[0] == '▁'][0]
    text = only_target[1:]
    assert only_target in own.tokens(own.encode(text, 'de')) and only_target not in own.tokens(own.encode(text, 'en'))


def test_what_is_not_sentencepiece():
    pytest.importorskip('sentencepiece')
    for data in (b'', b'no model'):
        with pytest.raises(ValueError, match='not a SentencePiece model'):
            open_sentencepiece(data)


def test_without_sentencepiece(monkeypatch):
    monkeypatch.setitem(sys.modules, 'sentencepiece', None)
    with pytest.raises(ImportError, match='pip install'):
        open_sentencepiece(b'')


def test_words_of_tokens(pairs, sentencepiece_tokenizer):
    words = WordTokenizer([*SPECIALS, 'the', '￭.', 'Haus'], LANGS)
    assert [words.word(i) for i in range(len(words))] == [''] * 4 + ['the', '.', 'Haus']
    bpe = train_tokenizer('bpe', pairs, LANGS, 400)
    assert bpe.word(EOS) == '' and [bpe.word(i) for i in bpe.encode('. A,')] == ['', '.', 'A', ',']
    for tokenizer in (bpe, sentencepiece_tokenizer): # a later part of a word is not a word
        parts = [i for i in range(4, len(tokenizer)) if tokenizer.token(i)[0].isalpha()]
        assert parts and not any(map(tokenizer.word, parts))


# --- files

def test_save_and_load(tokenizer, tmp_path):
    loaded = load_tokenizer(tokenizer.save(tmp_path / 'tokenizer.json'))
    assert type(loaded) is type(tokenizer) and loaded.langs == LANGS and len(loaded) == len(tokenizer)
    for text in ('The <eos> dog￭ isn\'t "old".', '', '中 ▁'):
        assert loaded.encode(text, 'en') == tokenizer.encode(text, 'en')
    assert loaded.save(tmp_path / 'again.json').read_bytes() == (tmp_path / 'tokenizer.json').read_bytes()


def test_save_and_load_sentencepiece(sentencepiece_tokenizer, tmp_path):
    tokenizer = sentencepiece_tokenizer
    own = SentencePieceTokenizer(tokenizer.files, [tokenizer.vocabularies[0], tokenizer.vocabularies[0][:90]], LANGS)
    for saved in (tokenizer, own):
        loaded = load_tokenizer(saved.save(tmp_path / 'tokenizer.json', overwrite=True))
        assert loaded.vocabularies == saved.vocabularies and loaded.files == saved.files
        assert loaded.encode('>>de<< the dog') == saved.encode('>>de<< the dog')


def test_a_file_that_is_not_a_tokenizer(tokenizer, tmp_path):
    good = json.loads(tokenizer.save(tmp_path / 'tokenizer.json').read_bytes())
    body = next(key for key in good if key in ('tokens', 'tokenizer'))
    damaged = [b'', b'{', b'\xff\xfe', b'null', b'[]', b'{"kind": null}', b'{"kind": {}}', b'\0' * 50,
               (tmp_path / 'tokenizer.json').read_bytes()[:-20]]
    for missing in ('kind', 'langs', body):
        damaged.append(json.dumps({key: value for key, value in good.items() if key != missing}).encode())
    for wrong in ({body: {}}, {body: ['a', 'b']}, {'kind': 'letters'}):
        damaged.append(json.dumps(good | wrong).encode())
    for data in damaged:
        (tmp_path / 'x.json').write_bytes(data)
        with pytest.raises(ValueError, match='x.json') as error:
            load_tokenizer(tmp_path / 'x.json')
        assert '\n' not in str(error.value)
    with pytest.raises(FileNotFoundError):
        load_tokenizer(tmp_path / 'none.json')


def test_special_tokens_in_another_order(pairs):
    "A vocabulary with other first tokens would take EOS for a word."
    with pytest.raises(ValueError, match='must start with <pad> <bos> <eos> <unk>, not <unk> <pad> <bos> <eos>'):
        WordTokenizer(['<unk>', '<pad>', '<bos>', '<eos>', 'the'], LANGS)
    state = train_tokenizer('bpe', pairs, LANGS, 200).state()
    vocab = state['tokenizer']['model']['vocab']
    vocab['<pad>'], vocab['<eos>'] = vocab['<eos>'], vocab['<pad>']
    state['tokenizer']['added_tokens'] = []
    with pytest.raises(ValueError, match='must start with'):
        BytePairTokenizer.from_state(state | {'langs': []})


def test_training_gives_the_same_file_in_every_process(tmp_path):
    code = '''if True:
        import sys
        from annotated_transformer import vocabulary
        from annotated_transformer.toy_languages import toy_ende
        from annotated_transformer.vocabulary import train_tokenizer
        pairs = [(pair.src, pair.tgt) for pair in toy_ende('train', n=400)]
        for kind in ('bpe', 'words'):
            train_tokenizer(kind, pairs, ('en', 'de'), 300).save(f'{sys.argv[1]}/{kind}.json')
    '''
    files = []
    for seed, threads in (('0', '1'), ('7', '4')):
        folder = tmp_path / seed
        folder.mkdir()
        done = python(code, folder, PYTHONHASHSEED=seed, RAYON_NUM_THREADS=threads)
        assert done.returncode == 0, done.stderr
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1] and set(files[0]) == {'bpe.json', 'words.json'}


def test_libraries_are_imported_only_when_used():
    done = python('import sys, annotated_transformer.vocabulary\n'
                  'print({"spacy", "tokenizers", "sentencepiece", "torch", "numpy"} & set(sys.modules))')
    assert done.stdout.strip() == 'set()', done.stderr


# --- the record of vocabulary sizes

def test_costs_of_a_vocabulary(tokenizer, pairs, monkeypatch):
    pytest.importorskip('sentencepiece')
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    import vocabulary_size
    monkeypatch.setattr(vocabulary_size, 'ENOUGH', 20)
    new = [('A zebra sleeps.', 'Ein Zebra schläft.')]
    found = vocabulary_size.measure(tokenizer, pairs, new)
    rows = [tokenizer.encode(text, lang) for text, lang in zip(new[0], LANGS)]
    assert found['tokens'] == len(tokenizer)
    assert found['tokens_per_sentence'] == (len(rows[0]) + len(rows[1])) / 2
    assert found['unknown'] == sum(row.count(UNK) for row in rows) / (len(rows[0]) + len(rows[1]))
    text = [i for pair in pairs for text, lang in zip(pair, LANGS) for i in tokenizer.encode(text, lang)]
    frequent = [i for i in range(len(SPECIALS), len(tokenizer)) if text.count(i) >= 20]
    assert 0 < found['frequent'] == len(frequent) / (len(tokenizer) - len(SPECIALS)) < 1


# --- real text

@needs_data
@pytest.mark.parametrize('lang', ['en', 'de', 'fr'])
@pytest.mark.parametrize('kind', ['bpe', 'words'])
def test_round_trips_of_real_text(kind, lang):
    texts = real_sentences('val', lang)
    tokenizer = train_tokenizer(kind, [(text, text) for text in texts], (lang, lang), 100_000, min_freq=1)
    for text, ids in zip(texts, tokenizer.encode_batch(texts, lang)):
        assert tokenizer.decode(ids) == normalize(text)


@needs_data
def test_byte_pairs_of_unseen_real_text():
    texts = real_sentences('test_2016_flickr', 'en')
    tokenizer = train_tokenizer('bpe', [(text, text) for text in real_sentences('val', 'en')], ('en', 'en'), 2000)
    rows = tokenizer.encode_batch(texts)
    assert sum(row.count(UNK) for row in rows) < 20
    assert sum(tokenizer.decode(row) == normalize(text) for text, row in zip(texts, rows)) > 980
