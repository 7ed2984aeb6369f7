"Cached, batched search returns the tokens of the reference search."
import math

import pytest
import torch

from annotated_transformer import decoding
from annotated_transformer.batches import pad_rows
from annotated_transformer.inference import (
    DecoderState, DecodingConfig, FinishedHypotheses, KeyValueCache, beam_search, greedy, process_logits, sample)
from annotated_transformer.recurrent import Recurrent, RecurrentConfig
from annotated_transformer.relative_positions import RelativeConfig, RelativeTransformer
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import BOS, EOS, PAD

SIZES = {'vocab_size': 23, 'n_layers': 2, 'd_model': 16, 'd_ff': 24, 'n_heads': 4, 'max_len': 40}


def make_model(kind):
    torch.manual_seed(1)
    if kind == 'post-norm':
        model = Transformer(TransformerConfig(**SIZES))
    elif kind == 'pre-norm, learned positions':
        model = Transformer(TransformerConfig(**SIZES, norm='pre', positions='learned', tied=False))
    elif kind == 'own head sizes':
        model = Transformer(TransformerConfig(**SIZES, d_k=3, d_v=5))
    else:
        model = RelativeTransformer(RelativeConfig(**SIZES, norm='pre', positions=kind))
    with torch.no_grad(): # sharper distributions, so that translations end at different lengths
        model.lm_head.weight.mul_(3)
    return model.eval()


KINDS = ['post-norm', 'pre-norm, learned positions', 'own head sizes', 'rotary', 'alibi']


@pytest.fixture(params=KINDS)
def model(request):
    return make_model(request.param)


@pytest.fixture
def src():
    "Twelve sentences of 1 to 9 tokens, padded."
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 23, (12, 9), generator=generator)
    for row, length in zip(ids, [8, 3, 1, 5, 8, 2, 7, 4, 6, 1, 3, 8]):
        row[length] = EOS
        row[length + 1:] = PAD
    return ids


def one_by_one(src):
    "Each sentence without its padding."
    return [row[row != PAD][None] for row in src]


def test_cached_logits_equal_those_of_one_pass(model, src):
    tgt = torch.randint(4, 23, (12, 6), generator=torch.Generator().manual_seed(1))
    tgt[:, 0] = BOS
    with torch.no_grad():
        state = DecoderState(model, src)
        steps = [state.logits(tgt[:, i:i + 1])[:, 0] for i in range(6)]
        expected = model(src, tgt)
    torch.testing.assert_close(torch.stack(steps, dim=1), expected, atol=1e-4, rtol=1e-4)


def test_reordered_hypotheses_keep_their_own_past(model, src):
    "Two hypotheses of a sentence swap places: the logits follow them."
    tokens = torch.tensor([[5, 9]]).expand(12, 2)
    with torch.no_grad():
        states = [DecoderState(model, src) for _ in range(2)]
        for state in states:
            state.logits(torch.full((12, 1), BOS))
            state.reorder(torch.zeros(12, 2, dtype=torch.long))
            state.logits(tokens)
        states[1].reorder(torch.tensor([[1, 0]]).expand(12, 2))
        straight = states[0].logits(torch.tensor([[7, 7]]).expand(12, 2))
        swapped = states[1].logits(torch.tensor([[7, 7]]).expand(12, 2))
    torch.testing.assert_close(straight, swapped.flip(1), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(straight, swapped, atol=1e-3)


def test_selected_sentences_continue_unchanged(model, src):
    rows = torch.tensor([3, 0, 7])
    with torch.no_grad():
        states = [DecoderState(model, src), DecoderState(model, src[rows])]
        states[0].logits(torch.full((12, 1), BOS))
        states[1].logits(torch.full((3, 1), BOS))
        states[0].select_rows(rows)
        left, right = (state.logits(torch.full((3, 1), 6)) for state in states)
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('beam_size, length_penalty', [(4, 0.6), (3, 0.0), (2, 1.5), (1, 0.6)])
def test_beam_search_equals_the_reference(model, src, beam_size, length_penalty):
    settings = {'beam_size': beam_size, 'length_penalty': length_penalty, 'max_extra_tokens': 8,
                'n_best': min(beam_size, 2)}
    for hypotheses, sentence in zip(beam_search(model, src[:6], **settings), one_by_one(src)):
        reference = decoding.beam_search(model, sentence, **settings)
        assert [found.ids for found in hypotheses] == [found.ids for found in reference]
        for found, expected in zip(hypotheses, reference):
            assert math.isclose(found.log_prob, expected.log_prob, abs_tol=1e-4)
            assert math.isclose(found.normalized_score, expected.normalized_score, abs_tol=1e-4)


def test_greedy_equals_the_reference(model, src):
    assert [found.ids for found in greedy(model, src, max_extra_tokens=9)] == decoding.greedy(model, src, 9)


def test_beam_of_one_is_greedy(model, src):
    beams = beam_search(model, src, beam_size=1, max_extra_tokens=9)
    assert [found[0].ids for found in beams] == [found.ids for found in greedy(model, src, max_extra_tokens=9)]


def test_batch_equals_single_sentences(model, src):
    batched = beam_search(model, src, max_extra_tokens=9)
    alone = [beam_search(model, sentence, max_extra_tokens=9)[0] for sentence in one_by_one(src)]
    assert [found[0].ids for found in batched] == [found[0].ids for found in alone]


def test_log_probs_are_those_of_teacher_forcing(model, src):
    for hypotheses, sentence in zip(beam_search(model, src, max_extra_tokens=6), one_by_one(src)):
        ids = hypotheses[0].ids
        is_finished = len(ids) < sentence.size(1) + 6
        target = torch.tensor([ids + [EOS]] if is_finished else [ids])
        with torch.no_grad():
            logits = model(sentence, torch.cat([torch.tensor([[BOS]]), target[:, :-1]], dim=1))
        logits[..., [PAD, BOS]] = -math.inf
        expected = logits.log_softmax(-1).gather(-1, target[..., None]).sum().item()
        assert math.isclose(hypotheses[0].log_prob, expected, abs_tol=1e-3)


def test_n_best_lists_are_sorted_and_different(model, src):
    "Finished hypotheses come first, best first; then those that were cut off at the maximum length."
    lengths = (src != PAD).sum(1).tolist()
    for hypotheses, length in zip(beam_search(model, src, n_best=3, max_extra_tokens=9), lengths):
        assert len({tuple(hypothesis.ids) for hypothesis in hypotheses}) == len(hypotheses) == 3
        cut_off = [len(hypothesis.ids) == length + 9 for hypothesis in hypotheses]
        ranks = [(cut, -hypothesis.normalized_score) for cut, hypothesis in zip(cut_off, hypotheses)]
        assert ranks == sorted(ranks)


def test_prefix_is_kept(model, src):
    prefix = [[7, 8]] * 6 + [[]] * 6
    for search in (lambda: [found[0] for found in beam_search(model, src, prefix=prefix)],
                   lambda: greedy(model, src, prefix=prefix),
                   lambda: sample(model, src, prefix=prefix, generator=torch.Generator().manual_seed(0))):
        assert all(found.ids[:2] == [7, 8] for found in search()[:6])


def test_minimum_length(model, src):
    assert all(len(found[0].ids) >= 6 for found in beam_search(model, src, min_length=6))


def test_no_ngram_occurs_twice(model, src):
    for hypotheses in beam_search(model, src, no_repeat_ngram_size=2, max_extra_tokens=15):
        ids = hypotheses[0].ids
        bigrams = list(zip(ids, ids[1:]))
        assert len(set(bigrams)) == len(bigrams)


def test_maximum_length(model, src):
    lengths = (src != PAD).sum(1).tolist()
    for hypotheses, length in zip(beam_search(model, src, max_extra_tokens=2), lengths):
        assert len(hypotheses[0].ids) <= length + 2


def test_samples_equal_the_reference(model, src):
    "The same seed draws the same tokens, one sentence at a time."
    for seed, sentence in enumerate(one_by_one(src)[:4]):
        settings = {'temperature': 0.8, 'top_k': 9, 'top_p': 0.9, 'max_extra_tokens': 6}
        found = sample(model, sentence, **settings, generator=torch.Generator().manual_seed(seed))
        reference = decoding.sample(model, sentence, **settings, generator=torch.Generator().manual_seed(seed))
        assert [hypothesis.ids for hypothesis in found] == reference


def test_samples_repeat_with_the_seed(model, src):
    draws = [sample(model, src, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_sampling_from_the_best_token_is_greedy(model, src):
    sampled = sample(model, src, top_k=1, max_extra_tokens=9)
    assert [found.ids for found in sampled] == [found.ids for found in greedy(model, src, max_extra_tokens=9)]


def test_recurrent_model_is_searched_by_the_same_code(src):
    torch.manual_seed(0)
    model = Recurrent(RecurrentConfig(vocab_size=23, d_model=16, max_len=40)).eval()
    batched = beam_search(model, src, max_extra_tokens=9)
    alone = [beam_search(model, sentence, max_extra_tokens=9)[0] for sentence in one_by_one(src)]
    assert [found[0].ids for found in batched] == [found[0].ids for found in alone]


def test_cache_returns_what_was_stored():
    "Two layers with different numbers of heads share the tensors."
    cache = KeyValueCache(2, [3, 1], 4, 5, like=torch.zeros(()))
    keys = torch.randn(2, 4, 40, 4)
    values = torch.randn(2, 4, 40, 5)
    for i in range(40):
        cache.add_position()
        for layer, heads in enumerate([slice(0, 3), slice(3, 4)]):
            key, value = cache.update(layer, keys[:, heads, i:i + 1], values[:, heads, i:i + 1])
            assert torch.equal(key, keys[:, heads, :i + 1])
            assert torch.equal(value, values[:, heads, :i + 1])


def finished_after(log_probs, **settings):
    "Finished hypotheses of one token each."
    finished = FinishedHypotheses(20, DecodingConfig(**settings))
    for i, log_prob in enumerate(log_probs):
        finished.add([7 + i], log_prob)
    return finished


def test_search_may_stop_when_no_active_hypothesis_can_win():
    "With 20 tokens, a log-probability of -3 gives a normalized score of -1.27 at most."
    score = -3 * (7 / 6) ** 0.6 / (25 / 6) ** 0.6 # log-probability of two tokens, EOS included, with this score
    assert not finished_after([]).may_stop(-3.0)
    assert finished_after([score + 0.01]).may_stop(-3.0)
    assert not finished_after([score - 0.01]).may_stop(-3.0)
    assert not finished_after([score + 0.01], n_best=2).may_stop(-3.0)
    assert not finished_after([score + 0.01, score - 0.01], n_best=2).may_stop(-3.0) # the worst one counts
    assert finished_after([score + 0.01, score + 0.02], n_best=2).may_stop(-3.0)


def test_search_may_stop_after_enough_finished_hypotheses():
    assert finished_after([-9.0], beam_size=1).may_stop(-0.1) # greedy search
    assert not finished_after([-9.0], beam_size=4, patience=0.5).may_stop(-0.1)
    assert finished_after([-9.0, -8.0], beam_size=4, patience=0.5).may_stop(-0.1)
    assert not finished_after([-9.0] * 4, beam_size=4).may_stop(-0.1)
    assert not finished_after([-9.0, -8.0], beam_size=4, patience=0.5, n_best=3).may_stop(-0.1)


def test_truncated_hypotheses_follow_the_finished_ones():
    finished = finished_after([-9.0, -math.inf], n_best=3)
    active = torch.tensor([[5, 6], [5, 7], [5, 8]])
    finished.end_truncated(active, torch.tensor([-1.0, -math.inf, -2.0]))
    assert [hypothesis.ids for hypothesis in finished.best] == [[7], [5, 6], [5, 8]] and finished.done
    finished.add([9], -0.1) # too late
    finished.end_truncated(active, torch.tensor([-1.0, -1.0, -1.0]))
    assert len(finished.best) == 3


def test_search_that_stops_early_finds_no_better_hypothesis():
    "One stops at its first finished hypothesis, the other when no active one can win."
    translator = Translator.load(device='cpu')
    src = pad_rows(translator.encode([pair.src for pair in toy_ende('test_long')[:30]]))
    hasty, patient = [[hypotheses[0].normalized_score for hypotheses in beam_search(translator.model, src, patience=patience)]
                      for patience in (0.25, None)]
    assert all(first <= best + 1e-5 for first, best in zip(hasty, patient))
    assert any(first < best - 0.01 for first, best in zip(hasty, patient))


def test_prefix_that_breaks_a_constraint_ends_the_translation():
    model = make_model('post-norm')
    found = greedy(model, torch.tensor([[5, 6, EOS]]), prefix=[[7, 8, 7, 8, 9]], no_repeat_ngram_size=2)
    assert found[0].ids == [7, 8, 7]


def test_translation_ends_where_the_constraints_forbid_every_token():
    "Three tokens, none of which may occur twice, and a minimum length of nine."
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**{**SIZES, 'vocab_size': 6})).eval()
    src = torch.tensor([[4, 5, EOS], [3, EOS, PAD]])
    constraints = {'no_repeat_ngram_size': 1, 'min_length': 9}
    for hypotheses in beam_search(model, src, n_best=2, **constraints):
        assert [len(hypothesis.ids) for hypothesis in hypotheses] == [3, 3]
        assert all(math.isfinite(hypothesis.log_prob) for hypothesis in hypotheses)
    assert all(sorted(found.ids) == [3, 4, 5] for found in greedy(model, src, **constraints))


def test_bfloat16_model_is_searched():
    model = make_model('post-norm').bfloat16()
    found = beam_search(model, torch.tensor([[7, 8, EOS], [9, EOS, PAD]]), max_extra_tokens=4)
    assert all(math.isfinite(hypotheses[0].log_prob) for hypotheses in found)


def test_number_of_threads_is_restored(src):
    n_threads = torch.get_num_threads()
    model = make_model('post-norm')
    with pytest.raises(ValueError, match='temperature'):
        sample(model, src, temperature=0.0)
    beam_search(model, src, max_extra_tokens=2)
    assert torch.get_num_threads() == n_threads


@pytest.mark.parametrize('name, value', [
    ('beam_size', 0), ('max_extra_tokens', -1), ('min_length', -1), ('no_repeat_ngram_size', -1),
    ('n_best', 0), ('n_best', 5), ('length_penalty', -0.1), ('length_penalty', math.nan),
    ('length_penalty_offset', -1.0), ('patience', 0.0), ('patience', math.inf)])
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        DecodingConfig(**{name: value})


@pytest.mark.parametrize('changes, name', [({'temperature': 0.0}, 'temperature'), ({'top_k': -1}, 'top_k'),
                                           ({'top_p': 0.0}, 'top_p'), ({'top_p': 1.1}, 'top_p')])
def test_sampling_settings_out_of_range_are_named(src, changes, name):
    with pytest.raises(ValueError, match=name):
        sample(make_model('post-norm'), src, **changes)


def test_bad_prefixes_are_named(src):
    model = make_model('post-norm')
    with pytest.raises(ValueError, match='2 prefixes for 12 sentences'):
        greedy(model, src, prefix=[[7], [8]])
    with pytest.raises(ValueError, match='max_len=40'):
        greedy(model, src, prefix=[[7] * 40] * 12)
    with pytest.raises(ValueError, match='PAD, BOS and EOS'):
        greedy(model, src, prefix=[[EOS]] * 12)


def test_nan_logits_are_an_error():
    logits = torch.full((1, 1, 9), math.nan)
    with pytest.raises(FloatingPointError, match='damaged'):
        process_logits(logits, torch.zeros(1, 1, 0, dtype=torch.long), DecodingConfig())
