"""What the vocabulary page cannot show: other processes, full disks, any string at all,
and real text where it is at hand.
"""
import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from annotated_transformer.v1.batches import encode_pairs
from annotated_transformer.v1.corpora import load_corpus
from annotated_transformer.v1.losses import linear_cross_entropy
from annotated_transformer.v1.optimizer import make_optimizer
from annotated_transformer.v1.toy_languages import toy_ende
from annotated_transformer.v1.transformer import Transformer, TransformerConfig
from annotated_transformer.v1.vocabulary import (BOS, EOS, PAD, SPECIALS, UNK, BytePairDropout, BytePairTokenizer,
                                              Vocabulary, WordTokenizer, build_vocab_from_iterator,
                                              dropout_pairs, load_tokenizer, load_vectors, normalize,
                                              read_vectors, train_tokenizer, use_vectors, write_whole)

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get('ANNOTATED_TRANSFORMER_MULTI30K') or ROOT.parent/'shared/data/multi30k')
needs_data = pytest.mark.skipif(not DATA.is_dir(),
                                reason='no Multi30k: set ANNOTATED_TRANSFORMER_MULTI30K to its folder')
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
        assert len(whole) > 100 and all(tokenizer.decode(row) == text for text, row in whole)


def test_any_string_has_ids(tokenizer):
    rng = random.Random(0)
    kinds = [range(0x80), range(0x3000), range(0xd700, 0xe100), range(0x1f300, 0x1f700), range(sys.maxunicode + 1)]
    strings = [''.join(chr(rng.choice(kind)) for _ in range(rng.randrange(30))) for kind in kinds for _ in range(60)]
    for text in [*strings, 'a'*20_000, '. '*5000, '￭', '▁', '￭ ￭￭', *SPECIALS, ' '.join(SPECIALS), '<eos>'*3]:
        ids = tokenizer.encode(text, 'de')
        assert all(UNK <= i < len(tokenizer) for i in ids), repr(text)       # never PAD, BOS or EOS
        assert isinstance(tokenizer.decode(ids), str)
        tokenizer.decode(ids).encode()                                 # and no lone surrogate comes back


def test_decode_takes_what_a_model_gives(tokenizer):
    ids = tokenizer.encode('The dog sleeps.', 'en')
    text = tokenizer.decode(ids)
    for row in ([BOS, *ids, EOS, PAD, PAD], [BOS, *ids, EOS, *ids], [PAD, *ids],
                torch.tensor([BOS, *ids, EOS]), tuple(ids)):
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
        for text, ids in zip(texts, tokenizer.encode_batch(texts, lang)):
            assert tokenizer.decode(ids) == normalize(text)


@needs_data
def test_unseen_real_text_keeps_its_letters():
    corpus = load_corpus('multi30k', data_dir=DATA)
    tokenizer = train_tokenizer('bpe', corpus['train'][:5000], corpus.langs, 4000)
    for side in (0, 1):
        texts = [p[side] for p in corpus['test_2016_flickr']]
        ids = tokenizer.encode_batch(texts)
        assert sum(row.count(UNK) for row in ids) < 10
        assert sum(tokenizer.decode(row) == normalize(text) for text, row in zip(texts, ids)) > 990


# --- BPE-dropout

@pytest.fixture(scope='module')
def pieces():
    "Pieces learned from a real training set where there is one."
    if DATA.is_dir(): return train_tokenizer('bpe', load_corpus('multi30k', data_dir=DATA)['train'][:5000], LANGS, 3000)
    return train_tokenizer('bpe', [(p.src, p.tgt) for p in toy_ende('train', n=3000)], LANGS, 800)


def test_no_dropout_is_the_library_on_any_string(pieces):
    rng = random.Random(0)
    kinds = [range(0x80), range(0x250), range(0x3000),
             range(0xd700, 0xe100), range(0x1f300, 0x1f700), range(sys.maxunicode + 1)]
    strings = [''.join(chr(rng.choice(kind)) for _ in range(rng.randrange(30))) for kind in kinds for _ in range(60)]
    strings += ['', ' ', '▁', '▁▁a', '_', 'a▁b', '中中文', 'x中x文中x', 'aaaaaaa', 'Ha'*50,
                ' '.join(SPECIALS), '<eos>'*3, 'e\u0301', '\0']
    strings += [text for p in toy_ende('test', n=200) for text in (p.src, p.tgt)]
    assert BytePairDropout(pieces, 0.0).encode_batch(strings) == pieces.encode_batch(strings)
    letters = BytePairDropout(pieces, 1.0).encode_batch(strings)
    assert all(i == UNK or len(pieces.token(i)) == 1 for row in letters for i in row)
    for row, sampled in zip(pieces.encode_batch(strings), BytePairDropout(pieces, 0.3).encode_batch(strings)):
        assert pieces.decode(sampled) == pieces.decode(row) and UNK <= min(sampled, default=UNK)
        assert sampled.count(UNK) == row.count(UNK)           # no merge makes or breaks an unknown


@needs_data
def test_no_dropout_is_the_library_on_all_of_multi30k():
    "In a process whose functions are not checked at each call; and what a pass costs beside the library's."
    done = python('''
import sys, time
from annotated_transformer.v1.corpora import load_corpus
from annotated_transformer.v1.vocabulary import BytePairDropout, dropout_pairs, train_tokenizer
corpus = load_corpus('multi30k', data_dir=sys.argv[1])
tokenizer = train_tokenizer('bpe', corpus['train'], corpus.langs, 4000)
texts = [text for split in ('train', 'val', 'test_2016_flickr') for pair in corpus[split] for text in pair]
assert BytePairDropout(tokenizer, 0.).encode_batch(texts) == tokenizer.encode_batch(texts)
print(len(texts))
''', DATA)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60_000


def exact_cuts(state, merges, p):
    "The probability of each end of algorithm 1 of Provilkov et al. (2020), by following all ways."
    possible = sorted((merges[pair], i) for i, pair in enumerate(zip(state, state[1:])) if pair in merges)
    found = Counter({state: p**len(possible)})
    for j, ((_, new), i) in enumerate(possible):
        for end, q in exact_cuts(state[:i] + (new,) + state[i+2:], merges, p).items(): found[end] += p**j * (1 - p) * q
    return found


def queue_cuts(state, merges, p):
    """The same for the library: a queue, to which what was left out returns whenever something is taken,
    even a pair that is gone.
    """
    memory = {}
    def entry(left, right, i):
        return [(merges[left, right][0], i, merges[left, right][1])] if (left, right) in merges else []
    def follow(row, queue):                       # a row keeps its places; what was merged away is None
        if (row, queue) in memory: return memory[row, queue]
        found = Counter({tuple(i for i in row if i is not None): p**len(queue)})
        for j, (_, i, new) in enumerate(queue):
            after, rest = row, queue[:j] + queue[j+1:]
            places = [k for k, x in enumerate(row) if x is not None and k > i]
            if row[i] is not None and places and merges.get((row[i], row[places[0]]), (0, None))[1] == new:
                after = tuple(new if k == i else None if k == places[0] else x for k, x in enumerate(row))
                before = [k for k in range(i) if row[k] is not None]
                more = entry(row[before[-1]], new, before[-1]) if before else []
                more += entry(new, row[places[1]], i) if len(places) > 1 else []
                rest = tuple(sorted((*rest, *more)))
            for end, q in follow(after, rest).items(): found[end] += p**j * (1 - p) * q
        memory[row, queue] = found
        return found
    return follow(state, tuple(sorted(e for i, pair in enumerate(zip(state, state[1:])) for e in entry(*pair, i))))


def far(counts, expected):
    "Chi-square less its mean, in standard deviations; cuts of which fewer than 10 are expected count as one."
    n = counts.total()
    rows = [(counts[c], n*q) for c, q in expected.items() if n*q >= 10]
    rest = n - sum(c for c, _ in rows), n - sum(e for _, e in rows)
    if rest[1] >= 1: rows.append(rest)
    assert rest[0] < 10*len(expected) + 30
    return (sum((c - e)**2/e for c, e in rows) - len(rows) + 1) / (2*(len(rows) - 1))**0.5


@pytest.mark.parametrize('p', [0.1, 0.5])
def test_the_probabilities_are_those_of_the_paper(pieces, p):
    """Against the calculation; the library against a calculation of what it does instead,
    and both for words where they are one.
    """
    from tokenizers import Tokenizer
    ours, rust, n, same = BytePairDropout(pieces, p), Tokenizer.from_str(pieces.model.to_str()), 5000, 0
    rust.model.dropout = p
    for word in 'dog zieht garden street playing Männer Hund'.split():
        (state,), exact = ours.words(word), exact_cuts(ours.words(word)[0], ours.merges, p)
        queue = queue_cuts(state, ours.merges, p)
        assert abs(sum(exact.values()) - 1) < 1e-9 and abs(sum(queue.values()) - 1) < 1e-9 and set(exact) == set(queue)
        assert far(Counter(map(tuple, ours.encode_batch([word]*n, seed=word))), exact) < 6
        theirs = Counter(tuple(e.ids) for e in rust.encode_batch([word]*n))
        assert far(theirs, queue) < 6
        if sum(abs(exact[c] - queue[c]) for c in exact) < 0.01:
            same += 1
            assert far(theirs, exact) < 6
    assert ours.encode_batch(['zieht dog'], seed=4) == ours.encode_batch(['zieht dog'], seed=4)
    if DATA.is_dir(): assert same < 7           # they are not one for all


def test_dropout_is_the_same_in_every_process(pieces, tmp_path):
    pieces.save(tmp_path/'t.json')
    code = '''
import sys
from annotated_transformer.v1.toy_languages import toy_ende
from annotated_transformer.v1.vocabulary import dropout_pairs, load_tokenizer
pairs = [(p.src, p.tgt) for p in toy_ende('train', n=200)]
epoch_pairs = dropout_pairs(pairs, load_tokenizer(sys.argv[1]), ('en', 'de'), 20, 0.2, seed=3)
for epoch in map(int, sys.argv[2].split()): ids = epoch_pairs(epoch)
print(ids)
'''
    runs = [python(code, tmp_path/'t.json', epochs, PYTHONHASHSEED=seed)
            for epochs, seed in (('0 1 2', '0'), ('2', '7'), ('1', '0'))]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    assert runs[0].stdout == runs[1].stdout != runs[2].stdout       # epoch 2 is epoch 2, whatever came before


def test_dropout_pairs_without_dropout_are_encoded_pairs(pieces, pairs):
    assert dropout_pairs(pairs, pieces, LANGS, dropout=0.0)(7) == encode_pairs(pairs, pieces, LANGS)
    with pytest.warns(UserWarning, match='cut'): short = encode_pairs(pairs, pieces, LANGS, 6)
    assert dropout_pairs(pairs, pieces, LANGS, 6, 0.0)(0) == short
    assert dropout_pairs([], pieces, LANGS)(0) == []


def test_a_memory_that_is_too_small_changes_nothing(pieces, pairs):
    texts = [text for pair in pairs[:40] for text in pair]
    large, small = BytePairDropout(pieces, 0.4), BytePairDropout(pieces, 0.4, room=20)
    assert large.encode_batch(texts, seed=1) == small.encode_batch(texts, seed=1)
    assert len(small.nexts) <= 20 and len(small.starts) <= 20 < len(large.nexts)


def test_dropout_that_cannot_be(pieces, pairs):
    with pytest.raises(ValueError, match="kind 'words' has none"):
        dropout_pairs(pairs, train_tokenizer('words', pairs, LANGS), LANGS)
    for p in (-0.1, 1.5, float('nan')):
        with pytest.raises(ValueError, match='from 0 to 1'): BytePairDropout(pieces, p)
    with pytest.raises(ValueError, match='no room beside'): dropout_pairs(pairs, pieces, LANGS, 1)


# --- word vectors

WORDS = WordTokenizer([*SPECIALS, 'the', 'dog', '￭.', 'Haus', 'unseen'], LANGS)


def write_vectors(path, rows, header=False, end='\n'):
    "Rows of [word, numbers …] as a file of vectors; gzipped if its name says so."
    data = ((f'{len(rows)} {len(rows[0]) - 1}{end}' if header else '')
            + ''.join(' '.join(map(str, row)) + end for row in rows))
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == '.gz' else data.encode())
    return path


@pytest.mark.parametrize('end', ['\n', ' \n', '\r\n'])
@pytest.mark.parametrize('name', ['a.txt', 'a.vec.gz'])
@pytest.mark.parametrize('header', [False, True])
def test_vectors_in_every_format(tmp_path, name, header, end):
    rows = [['the', 1, 0], ['.', 0, '-2e0'], ['a\u00a0b', 9, 9], ['haus', 3, 3], ['1', 5, 5], ['zz', 7, 7]]
    path = write_vectors(tmp_path/name, rows, header, end)
    assert dict(read_vectors(path, 2, lambda word: True)) == {word: [float(x) for x in row] for word, *row in rows}
    ids, found = load_vectors(path, WORDS, 2)
    assert ids == [4, 6, 7] and found.dtype == np.float32
    np.testing.assert_allclose(found / found[0, 0], [[1, 0], [0, -2], [3, 3]], rtol=1e-6)
    assert np.square(found).mean() == pytest.approx(1/2)


def test_the_first_of_two_alike(tmp_path):
    path = write_vectors(tmp_path/'v.txt', [
        ['HAUS', 0, 1], ['Haus', 1, 0], ['Haus', 5, 5], ['DOG', 2, 0], ['Dog', 0, 2],
        ['<unk>', 8, 8], ['<eos>', 8, 8]])
    ids, rows = load_vectors(path, WORDS, 2)
    # the spelling itself; else the commonest that is alike
    assert ids == [5, 7] and rows[0, 1] == rows[1, 1] == 0


@pytest.mark.parametrize('data, said', [
    (b'', 'is empty'), (b'\n', 'line 1'), (b'the 1 2\ndog 1\n', "line 2: a word and 2 numbers expected, not b'dog 1'"),
    (b'the 1 2\n\ndog 1 2\n', 'line 2'), (b'the 1 2\ndog 1 2 3\n', 'line 2'),
    (b'the 1 2\ndog 1 two\n', "line 2.*b'two'"), (b'the 1 2\ndog 1 inf\n', 'line 2.*finite'),
    (b'the 1 2 3\n', 'line 1.*3 numbers.*d_model=2'), (b'5 300\n', 'd_model=2'),
    (b'the cat sat\n', 'line 1'), (b'other 1 2\n', 'of another language'), (b'the 0 0\n', 'another language'),
    (b'7 2\n', 'another language'), (b'\xff\xfe 1 2\n', 'another language'),
    (gzip.compress(b'the 1 2\n'*99, mtime=0)[:-5], 'damaged gzip'),
    (gzip.compress(b'the 1 2\n'*99, mtime=0)[:20] + b'x'*20, 'damaged gzip')])
def test_a_file_that_holds_no_vectors(tmp_path, data, said):
    (tmp_path/'v.txt').write_bytes(data)
    with pytest.raises(ValueError, match='v.txt.*' + said): load_vectors(tmp_path/'v.txt', WORDS, 2)
    with pytest.raises(FileNotFoundError): load_vectors(tmp_path/'none.txt', WORDS, 2)


@pytest.mark.skipif(not Path('/proc/self/status').is_file(), reason='peak memory is read from /proc')
def test_a_large_file_is_streamed(tmp_path):
    "30 MB of vectors of which three are needed: memory grows by little."
    line = ' '.join(['0.12345']*50)
    with open(tmp_path/'v.txt', 'w') as file: file.writelines(f'w{i} {line}\n' for i in range(75_000))
    with open(tmp_path/'v.txt', 'a') as file: file.writelines(f'{w} {line}\n' for w in ('the', 'dog', 'haus'))
    done = python('''
import sys
from annotated_transformer.v1.vocabulary import SPECIALS, WordTokenizer, load_vectors
tokenizer = WordTokenizer([*SPECIALS, 'the', 'dog', 'Haus'], ('en',))
def peak(): # getrusage would count what the parent had when it started this process
    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))
before = peak()
print(load_vectors(sys.argv[1], tokenizer, 50)[0], peak() - before < 4000)
''', tmp_path/'v.txt')
    assert done.stdout == '[4, 5, 6] True\n', done.stderr


@pytest.mark.parametrize('freeze', [False, True])
@pytest.mark.parametrize('tied', [False, True])
def test_a_model_that_starts_from_vectors(tied, freeze, tmp_path):
    "What came stays if it is frozen, what did not come learns, and a second file leaves the first alone."
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=len(WORDS), n_layers=1, d_model=16, d_ff=16, n_heads=2,
                                          dropout=0.0, tied=tied))
    drawn = model.src_embed.weight.detach().clone()
    rng = np.random.default_rng(0)
    english = write_vectors(tmp_path/'en.txt', [['the', *(40*rng.normal(size=16))], ['dog', *(40*rng.normal(size=16))]])
    german = write_vectors(tmp_path/'de.vec', [['Haus', *rng.normal(size=16)]], header=True)
    assert use_vectors(model, english, WORDS, freeze) == 2/5
    first = model.src_embed.weight[[4, 5]].detach().clone()
    assert use_vectors(model, german, WORDS, freeze) == 1/5
    weight, here, others = model.src_embed.weight, [4, 5, 7], [0, 1, 2, 3, 6, 8]
    assert torch.equal(weight[others], drawn[others]) and torch.equal(weight[[4, 5]], first)
    assert weight[here].square().mean().item() == pytest.approx(1/16, rel=1e-4)
    assert torch.equal(model.tgt_embed.weight[here], weight[here])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, rate=0.01)
    src, tgt, y = (torch.arange(36).view(4, 9) % 9 for _ in range(3))
    for _ in range(3):
        optimizer.zero_grad()
        linear_cross_entropy(model.states(src, tgt).flatten(0, 1), model.output.weight, y.flatten()).backward()
        optimizer.step()
    for name in ('src_embed', 'tgt_embed'):
        now, then = getattr(model, name).weight, before.get(f'{name}.weight', before['src_embed.weight'])
        assert torch.equal(now[here], then[here]) == freeze and not torch.equal(now[[6, 8]], then[[6, 8]])
    if not tied: assert not torch.equal(model.output.weight[here], before['output.weight'][here])


def test_words_of_tokens(pieces):
    assert [WORDS.word(i) for i in range(len(WORDS))] == ['']*4 + ['the', 'dog', '.', 'Haus', 'unseen']
    assert pieces.word(EOS) == '' and [pieces.word(i) for i in pieces.encode('. A,')] == ['', '.', 'A', ',']
    inside = [i for i in range(4, len(pieces)) if pieces.token(i)[0].isalpha()]
    assert inside and not any(map(pieces.word, inside))


# --- files

def test_save_and_load(tokenizer, tmp_path):
    loaded = load_tokenizer(tokenizer.save(tmp_path/'tokenizer.json'))
    assert type(loaded) is type(tokenizer) and loaded.langs == LANGS and len(loaded) == len(tokenizer)
    for text in ('The <eos> dog￭ isn\'t "old".', '', '中 ▁'):
        assert loaded.encode(text, 'en') == tokenizer.encode(text, 'en')
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
from annotated_transformer.v1.toy_languages import toy_ende
from annotated_transformer.v1.vocabulary import train_tokenizer
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
    done = python('import sys, annotated_transformer.v1.vocabulary\n'
                  'print({"spacy", "tokenizers", "torch"} & set(sys.modules))')
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
from annotated_transformer.v1.vocabulary import write_whole
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
from annotated_transformer.v1 import vocabulary
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
    assert (build_vocab_from_iterator(lines).get_itos() == build_vocab_from_iterator(lines[::-1]).get_itos()
            == ['y', 'a', 'x', 'z'])
    assert build_vocab_from_iterator(lines, max_tokens=2, specials=['y'], special_first=False).get_itos() == ['a', 'y']
    assert len(Vocabulary()) == 0


@pytest.mark.parametrize('options, said', [
    (dict(kind='letters'), 'known are bpe, words'), (dict(vocab_size=4), 'no room'), (dict(vocab_size=-1), 'no room'),
    (dict(min_freq=0), 'at least 1'), (dict(pairs=[]), 'no sentence pairs'), (dict(vocab_size=10), 'too small')])
def test_settings_that_cannot_be(options, said, pairs):
    with pytest.raises(ValueError, match=said):
        train_tokenizer(**dict(dict(kind='bpe', pairs=pairs, langs=LANGS), **options))
