"Word vectors: every published format, damaged files by line, frozen rows, large files."
import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import SPECIALS, WordTokenizer
from annotated_transformer.word_vectors import load_vectors, read_vectors, use_vectors

ROOT = Path(__file__).resolve().parents[1]
WORDS = WordTokenizer([*SPECIALS, 'the', 'dog', '￭.', 'Haus', 'unseen'], ('en', 'de'))


def write_vectors(path, rows, header=False, end='\n'):
    "Write rows [word, numbers ...] as a file of vectors; gzipped if its name says so."
    lines = [' '.join(map(str, row)) + end for row in rows]
    if header:
        lines.insert(0, f'{len(rows)} {len(rows[0]) - 1}{end}')
    data = ''.join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
    return path


@pytest.mark.parametrize('end', ['\n', ' \n', '\r\n'])
@pytest.mark.parametrize('name', ['a.txt', 'a.vec.gz'])
@pytest.mark.parametrize('header', [False, True])
def test_every_format(tmp_path, name, header, end):
    rows = [['the', 1, 0], ['.', 0, '-2e0'], ['a\u00a0b', 9, 9], ['haus', 3, 3], ['1', 5, 5], ['zz', 7, 7]]
    path = write_vectors(tmp_path / name, rows, header, end)
    assert dict(read_vectors(path, 2, lambda word: True)) == {word: [float(x) for x in row] for word, *row in rows}
    ids, found = load_vectors(path, WORDS, 2)
    assert ids == [4, 6, 7] and found.dtype == np.float32
    np.testing.assert_allclose(found / found[0, 0], [[1, 0], [0, -2], [3, 3]], rtol=1e-6) # one factor for all
    assert np.square(found).mean() == pytest.approx(1 / 2)


def test_published_words_with_spaces(tmp_path):
    lines = ['the 1 2 3\n', '. . . 4 5 6\n', 'at name@domain.com 7 8 9\n']
    found = [('. . .', [4, 5, 6]), ('at name@domain.com', [7, 8, 9])]
    for order in (lines, lines[1:]): # also in the first line
        (tmp_path / 'v.txt').write_text(''.join(order))
        assert list(read_vectors(tmp_path / 'v.txt', 3, lambda word: ' ' in word)) == found


def test_the_same_spelling_wins_then_the_first_with_the_same_letters(tmp_path):
    path = write_vectors(tmp_path / 'v.txt', [['HAUS', 0, 1], ['Haus', 1, 0], ['Haus', 5, 5], ['DOG', 2, 0],
                                              ['Dog', 0, 2], ['<unk>', 8, 8], ['<eos>', 8, 8]])
    ids, rows = load_vectors(path, WORDS, 2)
    assert ids == [5, 7] # special tokens have no vectors
    assert rows[0, 1] == rows[1, 1] == 0


@pytest.mark.parametrize('data, said', [
    (b'', 'is empty'), (b'\n', 'line 1'),
    (b'the 1 2\ndog 1\n', "line 2: expected a word and 2 numbers, not b'dog 1'"),
    (b'the 1 2\n\ndog 1 2\n', 'line 2'), (b'the 1 2\ndog 1 2 3\n', 'line 2'),
    (b'the 1 2\ndog 1 two\n', "line 2.*b'two'"), (b'the 1 2\ndog 1 inf\n', 'line 2.*not finite'),
    (b'the 1 2 3\n', 'line 1.*3 numbers.*d_model=2'), (b'5 300\n', 'd_model=2'),
    (b'the cat sat\n', "line 1: expected a word and 2 numbers, not b'the cat sat'"),
    (b'other 1 2\n', 'for another language'), (b'the 0 0\n', 'for another language'),
    (b'7 2\n', 'for another language'), (b'\xff\xfe 1 2\n', 'for another language'),
    (gzip.compress(b'the 1 2\n' * 99, mtime=0)[:-5], 'damaged gzip'),
    (gzip.compress(b'the 1 2\n' * 99, mtime=0)[:20] + b'x' * 20, 'damaged gzip')])
def test_a_file_that_holds_no_vectors(tmp_path, data, said):
    (tmp_path / 'v.txt').write_bytes(data)
    with pytest.raises(ValueError, match='v.txt.*' + said):
        load_vectors(tmp_path / 'v.txt', WORDS, 2)
    with pytest.raises(FileNotFoundError):
        load_vectors(tmp_path / 'none.txt', WORDS, 2)


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/self/status').is_file(), reason='peak memory is read from /proc')
def test_a_large_file_is_streamed(tmp_path):
    "30 MB of vectors of which three are needed: memory grows by little."
    line = ' '.join(['0.12345'] * 50)
    with open(tmp_path / 'v.txt', 'w') as file:
        file.writelines(f'w{i} {line}\n' for i in range(75_000))
        file.writelines(f'{word} {line}\n' for word in ('the', 'dog', 'haus'))
    code = '''if True:
        import sys
        from annotated_transformer.vocabulary import SPECIALS, WordTokenizer
        from annotated_transformer.word_vectors import load_vectors
        tokenizer = WordTokenizer([*SPECIALS, 'the', 'dog', 'Haus'], ('en',))
        def peak(): # kB; getrusage would count what the parent had when it started this process
            return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))
        before = peak()
        print(load_vectors(sys.argv[1], tokenizer, 50)[0], peak() - before < 4000)
    '''
    done = subprocess.run([sys.executable, '-c', code, tmp_path / 'v.txt'], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == '[4, 5, 6] True\n', done.stderr


def two_files(folder):
    rng = np.random.default_rng(0)
    english = [['the', *(40 * rng.normal(size=16))], ['dog', *(40 * rng.normal(size=16))]]
    return (write_vectors(folder / 'en.txt', english),
            write_vectors(folder / 'de.vec', [['Haus', *rng.normal(size=16)]], header=True))


def small_model(tied):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(len(WORDS), n_layers=1, d_model=16, d_ff=16, n_heads=2, dropout=0.0,
                                         tied=tied))


def train(model, optimizer):
    src, tgt, labels = (torch.arange(36).view(4, 9) % 9 for _ in range(3))
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(src, tgt).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


@pytest.mark.parametrize('freeze', [False, True])
@pytest.mark.parametrize('tied', [False, True])
def test_a_model_that_starts_from_vectors(tied, freeze, tmp_path):
    model = small_model(tied)
    drawn = model.src_embed.weight.detach().clone()
    english, german = two_files(tmp_path)
    assert use_vectors(model, english, WORDS, freeze) == 2 / 5
    first = model.src_embed.weight[[4, 5]].detach().clone()
    assert use_vectors(model, german, WORDS, freeze) == 1 / 5
    weight = model.src_embed.weight
    with_vector, others = [4, 5, 7], [0, 1, 2, 3, 6, 8]
    assert torch.equal(weight[others], drawn[others])
    assert torch.equal(weight[[4, 5]], first) # the second file leaves the first alone
    assert weight[with_vector].square().mean().item() == pytest.approx(1 / 16, rel=1e-4)
    assert torch.equal(model.tgt_embed.weight[with_vector], weight[with_vector])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for name in ('src_embed', 'tgt_embed'):
        now = getattr(model, name).weight
        then = before.get(f'{name}.weight', before['src_embed.weight'])
        assert torch.equal(now[with_vector], then[with_vector]) == freeze
        assert not torch.equal(now[[6, 8]], then[[6, 8]]) # the others learn
    if not tied:
        assert not torch.equal(model.lm_head.weight[with_vector], before['lm_head.weight'][with_vector])


def test_weight_decay_changes_frozen_rows(tmp_path):
    "As the docstring of `use_vectors` says."
    model = small_model(tied=True)
    use_vectors(model, two_files(tmp_path)[0], WORDS, freeze=True)
    before = model.src_embed.weight[4].detach().clone()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    assert not torch.equal(model.src_embed.weight[4], before)
