"Decoding: searches are compared with enumeration and with plain loops, on small random models."
import itertools
import math

import pytest
import torch
from torch import tensor

from annotated_transformer.batches import pad_rows
from annotated_transformer.decoding import (allowed_log_probs, beam_search, greedy, normalized_score, sample,
                                            sampling_distribution, score_translations)
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import BOS, EOS, PAD


SEEDS = (14, 18, 42)    # random models whose translations are of different lengths, some of them truncated


def make_model(vocab_size=12, seed=42, sharpness=4.0, max_len=64):
    "A random model in eval mode whose distributions are far from uniform."
    torch.manual_seed(seed)
    config = TransformerConfig(vocab_size, n_layers=1, d_model=16, d_ff=32, n_heads=2, max_len=max_len, tied=False)
    model = Transformer(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


def make_sources(n=8, vocab_size=12, seed=0):
    "Padded sources of different lengths."
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, vocab_size, (2 + i % 4,), generator=generator).tolist() for i in range(n)]
    return pad_rows(rows, last=EOS)


def alone(src, i):
    "Sentence `i` without padding."
    return src[i:i + 1, :int((src[i] != PAD).sum())]


@torch.no_grad()
def next_log_probs(model, src, ids):
    "Log-probabilities after `ids`, straight from the whole model."
    logits = model(src, tensor([[BOS, *ids]]))[0, -1]
    logits[[PAD, BOS]] = -math.inf
    return logits.log_softmax(-1)


def complete_search(model, src, beam_size, alpha, limit):
    "Beam search on Python lists that never stops early: (normalized score, log_prob, ids), best first."
    active, finished = [(0.0, [])], []
    for length in range(1, limit + 1):
        candidates = []
        for log_prob, ids in active:
            for token, p in enumerate(next_log_probs(model, src, ids).tolist()):
                candidates.append((log_prob + p, ids + [token]))
        candidates.sort(reverse=True)
        for log_prob, ids in candidates[:beam_size]:
            if ids[-1] == EOS:
                finished.append((log_prob / ((5 + length) / 6) ** alpha, log_prob, ids[:-1]))
        active = [(log_prob, ids) for log_prob, ids in candidates if ids[-1] != EOS][:beam_size]
    return sorted(finished, reverse=True), active


def test_greedy_takes_the_most_probable_token_and_the_batch_does_not_matter():
    model, src = make_model(), make_sources()
    found = greedy(model, src, max_extra_tokens=6)
    for i, ids in enumerate(found):
        one = alone(src, i)
        expected = []
        while len(expected) < one.size(1) + 6:
            token = int(next_log_probs(model, one, expected).argmax())
            if token == EOS:
                break
            expected.append(token)
        assert ids == expected
    assert len({len(ids) for ids in found}) > 1, 'all translations have one length: a weak test'


def test_a_beam_of_one_is_greedy():
    for seed in SEEDS:
        model, src = make_model(seed=seed), make_sources()
        for i, ids in enumerate(greedy(model, src, max_extra_tokens=6)):
            assert beam_search(model, alone(src, i), beam_size=1, max_extra_tokens=6)[0].ids == ids


@pytest.mark.parametrize('beam_size, alpha, n_best', [(4, 0.6, 1), (3, 0.0, 3), (2, 1.0, 2), (4, 2.0, 2), (1, 0.6, 1)])
def test_stopping_early_does_not_change_the_result(beam_size, alpha, n_best):
    n_finished = 0
    for seed in SEEDS:
        model, src = make_model(seed=seed), make_sources(3)
        for i in range(len(src)):
            one = alone(src, i)
            limit = one.size(1) + 5
            found = beam_search(model, one, beam_size, alpha, max_extra_tokens=5, n_best=n_best)
            finished, active = complete_search(model, one, beam_size, alpha, limit)
            if beam_size == 1 and finished:
                finished.sort(key=lambda hypothesis: len(hypothesis[2]))     # greedy ends at its first EOS
            n_finished += len(finished[:n_best])
            truncated = [(p / ((5 + limit) / 6) ** alpha, p, ids) for p, ids in active]
            expected = (finished[:n_best] + truncated)[:n_best]
            assert [h.ids for h in found] == [ids for _, _, ids in expected]
            assert [h.log_prob for h in found] == pytest.approx([p for _, p, _ in expected], abs=1e-3)
            assert [h.normalized_score for h in found] == pytest.approx([s for s, _, _ in expected], abs=1e-3)
    assert n_finished > 2, 'hardly any hypothesis is finished: a weak test'


def test_a_beam_that_holds_everything_is_exhaustive_search():
    model = make_model(vocab_size=6, sharpness=1.0)         # three tokens (UNK, 4, 5) and EOS
    src = tensor([[4, 5, EOS]])
    everything = [list(ids) for n in range(4) for ids in itertools.product([3, 4, 5], repeat=n)]
    log_probs = score_translations(model, src.expand(len(everything), -1), everything)
    scores = [normalized_score(p, len(ids) + 1) for p, ids in zip(log_probs.tolist(), everything)]
    order = sorted(range(len(everything)), key=lambda i: -scores[i])
    found = beam_search(model, src, beam_size=200, n_best=40, max_extra_tokens=1)      # at most four tokens
    assert [h.ids for h in found] == [everything[i] for i in order]
    assert [h.normalized_score for h in found] == pytest.approx([scores[i] for i in order], abs=1e-4)


def test_log_probabilities_of_given_translations():
    model, src = make_model(), make_sources(3)
    translations = [[5, 6, 7], [], [8]]
    found = score_translations(model, src, translations).tolist()
    for i, ids in enumerate(translations):
        steps = [next_log_probs(model, alone(src, i), ids[:n])[token].item() for n, token in enumerate([*ids, EOS])]
        assert found[i] == pytest.approx(sum(steps), abs=1e-4)
    best = beam_search(model, src[2:3], max_extra_tokens=5)[0]
    assert 0 < len(best.ids) < 10, 'empty or truncated: a weak test'
    assert score_translations(model, src[2:3], [best.ids]).item() == pytest.approx(best.log_prob, abs=1e-3)


def test_padding_and_bos_have_probability_zero():
    logits = torch.randn(2, 3, 9)
    before = logits.clone()
    probs = allowed_log_probs(logits).exp()
    assert torch.equal(logits, before)
    assert not probs[..., [PAD, BOS]].any()
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3))


class NeverEnds(Transformer):
    "A model that never predicts EOS."
    def __init__(self, config):
        super().__init__(config)
        self.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, tensor([EOS]), -1e9))


def test_translations_are_truncated_at_the_maximum_length():
    torch.manual_seed(0)
    model = NeverEnds(TransformerConfig(12, n_layers=1, d_model=16, d_ff=32, n_heads=2, max_len=10)).eval()
    src = tensor([[5, 6, EOS], [7, EOS, PAD]])
    assert [len(ids) for ids in greedy(model, src, max_extra_tokens=4)] == [7, 6]
    assert [len(ids) for ids in sample(model, src, max_extra_tokens=50)] == [10, 10]   # the model's positions
    found = beam_search(model, src[:1], beam_size=3, max_extra_tokens=4, n_best=3)
    assert [len(hypothesis.ids) for hypothesis in found] == [7, 7, 7]
    assert sorted(found, key=lambda hypothesis: -hypothesis.log_prob) == found
    assert found[0].normalized_score == pytest.approx(found[0].log_prob / 2 ** 0.6)


class Language(torch.nn.Module):
    "A model that is a table {prefix: {token: probability}}; whatever is missing is impossible."
    def __init__(self, table):
        super().__init__()
        self.table = table
        self.config = TransformerConfig(16, d_model=16, n_heads=1, max_len=99)
        self.lm_head = torch.nn.Identity()

    def encode(self, src):
        return torch.zeros(len(src), src.size(1), 16)

    def decode(self, tgt, encoder_output, src_mask):
        logits = torch.full((len(tgt), tgt.size(1), 16), -1e4)
        for i, (_, *prefix) in enumerate(tgt.tolist()):
            for token, p in self.table.get(tuple(prefix), {EOS: 1.0}).items():
                logits[i, -1, token] = math.log(p)
        return logits


def test_beam_search_finds_what_greedy_decoding_misses():
    pronouns = Language({(): {4: 0.6, 5: 0.4}, (4,): {6: 0.35, 7: 0.33, 8: 0.32}, (5,): {7: 0.9, 6: 0.1}})
    src = tensor([[9, EOS]])
    assert greedy(pronouns, src) == [[4, 6]]
    best = beam_search(pronouns, src, beam_size=2)[0]
    assert best.ids == [5, 7]
    assert math.exp(best.log_prob) == pytest.approx(0.36, abs=1e-4)


def test_an_active_hypothesis_that_is_worse_now_may_still_win():
    "After 2 tokens the finished hypothesis has the better normalized score, but not in the end."
    table = {(): {4: 0.55, 5: 0.45}, (4,): {EOS: 1.0}}
    for n in range(1, 12):
        table[(5,) * n] = {5: 1.0}
    language, src = Language(table), tensor([[9, EOS]])
    assert normalized_score(math.log(0.45), 12) > normalized_score(math.log(0.55), 2) > normalized_score(math.log(0.45), 2)
    assert beam_search(language, src, beam_size=2)[0].ids == [5] * 12
    assert beam_search(language, src, beam_size=2, length_penalty=0.0)[0].ids == [4]


def test_a_beam_of_one_ends_at_its_first_eos():
    table = {(): {EOS: 0.55, 4: 0.45}}
    for n in range(1, 12):
        table[(4,) * n] = {4: 1.0}
    language, src = Language(table), tensor([[9, EOS]])
    assert normalized_score(math.log(0.45), 12) > normalized_score(math.log(0.55), 1)
    assert beam_search(language, src, beam_size=1)[0].ids == greedy(language, src)[0] == []
    assert beam_search(language, src, beam_size=2)[0].ids == [4] * 12


def test_number_of_translations_is_checked():
    for n_best in (0, 5):
        with pytest.raises(ValueError, match=f'n_best={n_best} must be between 1 and beam_size=4'):
            beam_search(make_model(), tensor([[5, EOS]]), n_best=n_best)


def test_length_penalty():
    assert normalized_score(-6.0, 13) == pytest.approx(-6 / 3 ** 0.6)       # (5 + 13) / 6 = 3
    assert normalized_score(-6.0, 13, 0.0) == -6
    assert normalized_score(-6.0, 12, 1.0, 0.0) == pytest.approx(-0.5)      # the mean per token
    assert normalized_score(-6.0, 1, 0.6) == -6                             # one token is the unit


def test_sampling_distribution():
    log_probs = tensor([0.15, 0.5, 0.05, 0.3]).log()
    def kept(**options): return (sampling_distribution(log_probs, **options) > 0).nonzero().flatten().tolist()
    assert kept(top_k=1) == [1]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=9) == kept() == [0, 1, 2, 3]
    assert [len(kept(top_p=p)) for p in (0.1, 0.45, 0.6, 0.85, 0.96)] == [1, 1, 2, 3, 4]
    assert kept(top_k=2, top_p=0.6) == [1]                                  # 0.5 / 0.8 is enough
    sharper = sampling_distribution(tensor([[0.8, 0.2]]).log(), temperature=0.5)
    torch.testing.assert_close(sharper, tensor([[0.64, 0.04]]) / 0.68)      # squared
    torch.testing.assert_close(sampling_distribution(log_probs), log_probs.exp())
    torch.testing.assert_close(sampling_distribution(log_probs, top_k=2), tensor([0, 5, 0, 3]) / 8)
    torch.testing.assert_close(sampling_distribution(log_probs, top_p=0.6), tensor([0, 5, 0, 3]) / 8)


@pytest.mark.parametrize('options', [{'temperature': 0.0}, {'temperature': -1.0}, {'top_k': -1}, {'top_p': 0.0},
                                     {'top_p': 1.1}])
def test_sampling_options_are_checked(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f'{name}={value}'):
        sampling_distribution(torch.zeros(1, 5), **options)


def test_samples_follow_the_distribution():
    model, src = make_model(), tensor([[5, 6, EOS]])
    seed = torch.Generator().manual_seed(0)
    draws = sample(model, src.expand(4000, -1), temperature=0.8, top_p=0.9, generator=seed, max_extra_tokens=0)
    first = tensor([(ids + [EOS])[0] for ids in draws]).bincount(minlength=12) / 4000
    expected = sampling_distribution(next_log_probs(model, src, []), temperature=0.8, top_p=0.9)
    torch.testing.assert_close(first, expected, atol=0.03, rtol=0)
    assert not first[expected == 0].any()


def test_a_seed_repeats_the_samples_and_one_token_left_is_greedy():
    model, src = make_model(), make_sources()
    def draw(seed): return sample(model, src, generator=torch.Generator().manual_seed(seed), max_extra_tokens=6)
    assert draw(0) == draw(0) != draw(1)
    assert sample(model, src, top_k=1, max_extra_tokens=6) == greedy(model, src, max_extra_tokens=6)
