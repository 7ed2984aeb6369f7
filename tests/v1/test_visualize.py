"The figures behind the pictures: words from tokens of any cut, links and their errors, what heads do."
import numpy as np
import pytest
import torch

from annotated_transformer.v1.toy_languages import toy_ende
from annotated_transformer.v1.translator import Translator
from annotated_transformer.v1.visualize import (
    alignment_links, alignment_scores, common_offset, favourite_offset, head_habits, plot_heads, points_at,
    strongest_links, word_of_token, word_weights)
from annotated_transformer.v1.vocabulary import BytePairTokenizer, WordTokenizer

PAIRS = toy_ende('test', n=60) + toy_ende('test_long', n=20)
TEXTS = [('en', [pair.src for pair in PAIRS]), ('de', [pair.tgt for pair in PAIRS])]


@pytest.fixture(scope='module', params=['shipped', 'letters', 'large', 'words'])
def tokenizer(request):
    "Pieces of the model that ships, single letters, whole words, and words marked where they touch."
    if request.param == 'shipped': return Translator.load(device='cpu').tokenizer
    if request.param == 'words': return WordTokenizer.train(TEXTS, min_freq=1)
    return BytePairTokenizer.train(TEXTS, vocab_size=70 if request.param == 'letters' else 2000, min_freq=1)

def numbers(tokenizer, text, lang, words): return word_of_token(tokenizer.tokens(tokenizer.encode(text, lang)), words)

def omniscient(pair, src, tgt):
    "A map, token to token with the end mark, that looks at what each token's word stands for; a comma at the end mark."
    weights = np.zeros((len(tgt) + 1, len(src) + 1))
    for s, t in alignment_links(pair.alignment):
        weights[np.ix_([i for i, word in enumerate(tgt) if word == t],
                       [i for i, word in enumerate(src) if word == s])] = 1
    weights[~weights.any(1), -1] = 1
    return weights/weights.sum(1, keepdims=True)


def test_every_token_finds_its_word(tokenizer):
    for pair in PAIRS:
        for text, lang, words in ((pair.src, 'en', pair.src_words), (pair.tgt, 'de', pair.tgt_words)):
            found = numbers(tokenizer, text, lang, words)
            assert found == sorted(found) and set(found) == set(range(len(words)))
            tokens = tokenizer.tokens(tokenizer.encode(text, lang))
            spelled = [''.join(t.strip('▁￭') for t, n in zip(tokens, found) if n == i) for i in range(len(words))]
            assert spelled == words

def test_a_head_that_knows_the_alignment_reaches_the_ceiling_however_words_are_cut(tokenizer):
    truth, links, late, early = [alignment_links(pair.alignment) for pair in PAIRS], [], [], []
    for pair in PAIRS:
        src, tgt = (numbers(tokenizer, pair.src, 'en', pair.src_words),
                    numbers(tokenizer, pair.tgt, 'de', pair.tgt_words))
        weights, no = omniscient(pair, src, tgt), [-1]
        links.append(strongest_links(word_weights(weights, tgt + no, src + no)))
        late.append(strongest_links(word_weights(weights, no + tgt, src + no)))
        early.append(strongest_links(word_weights(weights, tgt + no, no + src)))
    linked = sum(len({t for _, t in sentence}) for sentence in truth)
    right = alignment_scores(links, truth)
    assert right.precision == 1 and right.recall == linked/sum(map(len, truth))
    # a row, or a column, too late
    for wrong in late, early: assert alignment_scores(wrong, truth).aer > right.aer + 0.05

def test_marks_alone_letters_that_repeat_and_nothing_at_all():
    assert word_of_token(['▁', 'a', 'a', '▁', 'a', '▁'], ['aa', 'a']) == [0, 0, 0, 1, 1, 1]
    assert word_of_token([], []) == []
    assert word_of_token(['Ġto', 'day'], ['today'], marks='Ġ') == [0, 0]

@pytest.mark.parametrize('tokens, words, said', [
    (['ab'], ['a'], "spell 'ab', the words 'a'"), (['a'], ['a', 'b'], "spell 'a', the words 'ab'"),
    (['<eos>'], ['a'], 'spell'), (['a', 'bc'], ['ab', 'c'], "'bc' is more than a piece of the word 'ab'"),
    (['a'], [], 'spell')])
def test_tokens_that_are_no_pieces_of_the_words(tokens, words, said):
    with pytest.raises(ValueError, match=said): word_of_token(tokens, words)

def test_word_weights_keep_what_a_row_gives_away():
    weights = torch.rand(2, 3, 5, 7).softmax(-1).requires_grad_()
    merged = word_weights(weights, [0, 0, 1, 2, 2], [0, 1, 1, 2, 2, 2, 3])
    assert merged.shape == (2, 3, 3, 4)
    np.testing.assert_allclose(merged.sum(-1), 1, atol=1e-6)
    w = weights.detach().numpy()
    np.testing.assert_allclose(merged[1, 2, 0, 1], w[1, 2, :2, 1:3].sum(-1).mean(), atol=1e-6)
    some = word_weights(weights, [0, 0, 1, 2, 2], [0, -1, -1, 1, 1, 2, -1])
    np.testing.assert_allclose(some.sum(-1)[0, 0, 1], 1 - w[0, 0, 2, [1, 2, 6]].sum(), atol=1e-6)

@pytest.mark.parametrize('shape, queries, keys, said', [
    ((3,), [0], [0], r'shape \(3,\)'), ((2, 3), [0], [0, 1, 2], '1 numbers of words for 2 queries'),
    ((2, 3), [0, 1], [0, 1], '2 numbers of words for 3 keys'),
    ((2, 3), [1, 1], [0, 1, 2], 'word 0 has no token among the queries')])
def test_word_weights_of_what_does_not_fit(shape, queries, keys, said):
    with pytest.raises(ValueError, match=said): word_weights(np.ones(shape), queries, keys)

def test_alignment_error_rate_counts_links_and_not_sentences():
    truth = [{(0, 0)}, {(i, i) for i in range(9)}]
    assert alignment_scores([set(), truth[1]], truth).recall == 0.9
    assert alignment_scores([{(1, 0)}, truth[1]], truth) == (0.9, 0.9, pytest.approx(0.1))
    assert alignment_scores([], []) == (1, 1, 0)
    more = [links | {(5, 6)} for links in truth]
    assert alignment_scores(more, truth, more) == (1, 1, 0)            # what may be found costs nothing
    assert alignment_scores(more, truth).aer > 0

def test_habits_of_a_causal_map_and_of_a_generator():
    causal = torch.ones(4, 4).tril()/torch.arange(1, 5)[:, None]
    habits = head_habits(m[None, None] for m in (causal, causal[:2, :2]))
    assert {name: figure.shape for name, figure in habits.items()} == dict.fromkeys(
        ['entropy', 'distance', 'own', 'previous', 'next', 'first', 'last'], (1, 1))
    assert habits['next'].item() == 0
    np.testing.assert_allclose(habits['entropy'].item(), np.log([1, 2, 3, 4, 1, 2]).mean(), rtol=1e-6)
    np.testing.assert_allclose(habits['previous'].item(), np.mean([1/2, 1/3, 1/4, 1/2]), rtol=1e-6)
    np.testing.assert_allclose(habits['distance'].item(), np.mean([0, 0.5, 1, 1.5, 0, 0.5]), rtol=1e-6)

def test_offsets_beyond_the_sentence_do_not_count():
    ahead = np.diag(np.ones(3), 1)[None, None]
    ahead[..., 3, 0] = 1                                                # the last has nothing after it
    assert [figure.item() for figure in favourite_offset([ahead])] == [1, 1]
    assert [figure.item() for figure in favourite_offset([ahead, np.eye(2)[None, None]])] == [1, 3/4]

def test_pointing_sees_each_head_and_sentence_by_itself():
    maps = [np.stack([np.eye(3), np.eye(3)[::-1]])[None], np.stack([np.eye(2)[::-1], np.eye(2)])[None]]
    assert points_at(maps, [[(0, 0), (2, 0)], []]).tolist() == [[0.5, 0.5]]
    assert points_at(maps, [[], [(1, {0, 1})]]).tolist() == [[1, 1]]
    assert points_at(maps, [[(1, np.array([0, 1]))], [(0, np.int64(0))]]).tolist() == [[0.5, 1]]
    assert common_offset([[(0, 3), (np.int64(1), 0)], [], [(5, 4)]]) == (-1, pytest.approx(2/3))
    gone = [np.stack([np.eye(3), np.zeros((3, 3))])[None]]  # a head that was taken out points at nothing
    assert points_at(gone, [[(0, 0)]]).tolist() == [[1, 0]]
    with pytest.raises(ValueError, match='has a pair'): points_at(maps, [[], []])
    with pytest.raises(ValueError, match='2 sentences have maps, 1'): points_at(maps, [[(0, 0)]])

@pytest.mark.parametrize('figure', [head_habits, favourite_offset, lambda maps: points_at(maps, [[(0, 0)]])])
def test_maps_without_their_layers_are_refused(figure):
    with pytest.raises(ValueError, match=r'shape \(2, 3, 3\), not \(layers, heads, queries, keys\)'):
        figure([np.ones((2, 3, 3))])

def test_heads_are_drawn_with_their_figures():
    import matplotlib.pyplot as plt
    ax = plot_heads(torch.tensor([[0.126, -1.]]), 'one layer', vmin=-1, vmax=1)
    assert ([t.get_text() for t in ax.texts] == ['0.13', '-1.00']
            and [t.get_text() for t in ax.get_xticklabels()] == ['0', '1'])
    with pytest.raises(ValueError, match='3 labels for 2 columns'): plot_heads([[1., 2.]], 'too many', heads='abc')
    plt.close('all')
