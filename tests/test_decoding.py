"Decoding changes how fast a translation is found, never which: checked on random models in double precision."
import copy
import functools
import itertools
import math

import pytest
import torch

from annotated_transformer.attention import padding_mask
from annotated_transformer.batches import collate, pad_rows
from annotated_transformer.decoding import (Beam, Hypothesis, State, beam_search, best_continuations, greedy,
                                            length_limits, length_penalty)
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import BOS, EOS, PAD

V = 11
KINDS = [dict(norm=norm, positions=positions, tied=tied) for norm, positions, tied in     # each pair of settings once
         (('post', 'sinusoidal', True), ('post', 'learned', False), ('pre', 'sinusoidal', False), ('pre', 'learned', True))]
KINDS += [dict(n_layers=1, n_heads=1), dict(n_layers=3, d_model=12, n_heads=3, d_ff=5), dict(d_k=3, d_v=5)]


def name(kind): return ' '.join(str(v) for v in kind.values())


@functools.cache
def trained(seed, steps, **kind):
    "A tiny model that has begun to learn to write a source backwards: its texts differ, end, and are full of doubt."
    torch.manual_seed(seed)
    sizes = dict(vocab_size=V, n_layers=2, d_model=16, d_ff=24, n_heads=4, max_len=40, dropout=0.) | kind
    model = Transformer(TransformerConfig(**sizes))
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(steps):
        rows = [torch.randint(3, sizes['vocab_size'], (int(n),)).tolist() for n in torch.randint(1, 8, (16,))]
        batch = collate([(row, row[::-1]) for row in rows])
        logits = model(batch.src, batch.tgt_in)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.tgt_out.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.double().eval().requires_grad_(False)


def make(seed=0, steps=40, **kind): return copy.deepcopy(trained(seed, steps, **kind))


def last_norm(model): return model.decoder.norm if model.config.norm == 'pre' else model.decoder.layers[-1].add_norms[-1].norm


def sources(n=7, seed=1):
    "Sources of different lengths; the last is EOS alone."
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, V, (1 + i % 5,), generator=g).tolist() + [EOS] for i in range(n - 1)]
    return pad_rows(rows + [[EOS]])


def next_log_probs(model, src, ids):
    logits = model(src, torch.tensor([[BOS, *ids]]))[0, -1]
    logits[[PAD, BOS]] = -math.inf
    return logits.log_softmax(-1).tolist()


def alone(src, i): return src[i][src[i] != PAD][None]


def score_of(model, src, ids):
    "Teacher forcing."
    logits = model(src, torch.tensor([[BOS, *ids[:-1]]]))[0]
    logits[:, [PAD, BOS]] = -math.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum().item()


def plain_greedy(model, src, limit):
    ids = []
    while len(ids) < limit and EOS not in ids:
        p = next_log_probs(model, src, ids)
        ids.append(p.index(max(p)))
    return ids


def plain_beam(model, src, size, alpha, limit, n_best=1):
    "The definition: one sentence, everything computed anew and sorted, no end before the limit."
    live, ended = [(0., [])], []
    for length in range(1, limit + 1):
        candidates = [(p + q, ids + [t]) for p, ids in live for t, q in enumerate(next_log_probs(model, src, ids))]
        best = sorted((c for c in candidates if c[0] > -math.inf), reverse=True)[:size]
        penalty = ((5 + length) / 6) ** alpha
        ended += [(p / penalty, ids[:-1], p) for p, ids in best if ids[-1] == EOS]
        live = [(p, ids) for p, ids in best if ids[-1] != EOS]
    found = sorted(ended, reverse=True)[:n_best]
    return found + [(p / penalty, ids, p) for p, ids in live[:n_best - len(found)]]


def same(found, expected):
    assert [h.ids for h in found] == [ids for _, ids, _ in expected]
    assert [h.score for h in found] == pytest.approx([s for s, _, _ in expected], abs=1e-9)
    assert [h.log_prob for h in found] == pytest.approx([p for _, _, p in expected], abs=1e-9)


@pytest.mark.parametrize('kind', KINDS, ids=name)
def test_greedy_is_the_likeliest_token_again_and_again(kind):
    model, src = make(**kind), sources()
    for i, (h, limit) in enumerate(zip(greedy(model, src, 6), length_limits(src, 6, 40))):
        expected = plain_greedy(model, alone(src, i), limit)
        assert h.ids == [t for t in expected if t != EOS] and h.score == h.log_prob
        assert h.log_prob == pytest.approx(score_of(model, alone(src, i), expected), abs=1e-9)


@pytest.mark.parametrize('kind', KINDS, ids=name)
def test_beam_search_is_its_definition(kind):
    model, src = make(**kind), sources(5)
    for size, alpha, n_best in ((3, 0.6, 2), (2, 0., 1)):
        for i, found in enumerate(beam_search(model, src, size, alpha, 4, n_best)):
            same(found, plain_beam(model, alone(src, i), size, alpha, int((src[i] != PAD).sum()) + 4, n_best))


@pytest.mark.parametrize('steps', [0, 20, 40])
@pytest.mark.parametrize('alpha', [0., 0.6, 2.])
def test_stopping_early_changes_nothing(steps, alpha, monkeypatch):
    model, src = make(5, steps), sources(20)
    settings = [dict(beam_size=size, n_best=n_best) for size, n_best in ((1, 1), (4, 1), (6, 3))]
    def searches(): return [beam_search(model, src, alpha=alpha, max_extra=12, **s) for s in settings]
    early = searches()
    monkeypatch.setattr(Beam, 'reach', lambda beam: math.inf)
    for before, after in zip(early, searches()):
        for best, expected in zip(before, after): same(best, [(h.score, h.ids, h.log_prob) for h in expected])


def test_stopping_early_saves_steps(monkeypatch):
    asked, log_probs = [], State.log_probs
    monkeypatch.setattr(State, 'log_probs', lambda state: asked.append(len(state.last)) or log_probs(state))
    model, src = make(5), sources(20)
    beam_search(model, src, max_extra=12)
    rows = sum(asked)
    monkeypatch.setattr(Beam, 'reach', lambda beam: math.inf)
    beam_search(model, src, max_extra=12)
    assert rows < 0.8 * (sum(asked) - rows)


def test_a_few_bad_endings_do_not_stop_a_search():
    "With the rule 'stop when `size` have ended' this search would end with a translation of no tokens."
    beam = Beam(size=2, alpha=0.6, limit=60, n_best=1)
    for length in range(1, 8):
        beam.grow([(0, 7, -0.01 * length), (0, EOS, -9. - length / 100)])
        assert not beam.done()
    beam.grow([(0, EOS, -0.1), (0, 8, -7.)])
    assert beam.done() and beam.ended[0].ids == [7] * 7


@pytest.mark.parametrize('kind', KINDS, ids=name)
def test_a_beam_of_one_is_greedy(kind):
    model, src = make(**kind), sources(30)
    for g, [b] in zip(greedy(model, src, 9), beam_search(model, src, 1, max_extra=9)):
        assert g.ids == b.ids and g.log_prob == pytest.approx(b.log_prob, abs=1e-9)


@pytest.mark.parametrize('seed', [0, 5])
def test_company_and_order_change_nothing(seed):
    model, src = make(seed), sources(4)
    def searches(src): return zip(greedy(model, src, 5), beam_search(model, src, 3, max_extra=5, n_best=2))
    by_itself = [next(searches(alone(src, i))) for i in range(4)]
    for order in itertools.permutations(range(4)):
        for i, (g, best) in zip(order, searches(src[list(order)])):
            assert g.ids == by_itself[i][0].ids and [h.ids for h in best] == [h.ids for h in by_itself[i][1]]
            assert [h.score for h in best] == pytest.approx([h.score for h in by_itself[i][1]], abs=1e-9)


@pytest.mark.parametrize('steps', [0, 20])
def test_a_beam_that_holds_everything_searches_everything(steps):
    model, src, limit = make(0, steps, vocab_size=7), torch.tensor([[4, EOS]]), 4
    texts = [list(ids) for n in range(limit) for ids in itertools.product((3, 4, 5, 6), repeat=n)]
    p = [score_of(model, src, ids + [EOS]) for ids in texts]
    def ranked(alpha):
        return sorted(((p / length_penalty(len(ids) + 1, alpha), ids, p) for ids, p in zip(texts, p)), reverse=True)
    for alpha in (0., 0.6):
        same(beam_search(model, src, 5 ** limit, alpha, 2, len(texts))[0], ranked(alpha))
        same(beam_search(model, src, 5 ** limit, alpha, 2)[0], ranked(alpha)[:1])


@pytest.mark.parametrize('kind', KINDS, ids=name)
def test_state_remembers_what_would_be_computed_anew(kind):
    model, src = make(**kind), sources(4)
    state, history, rng = State(model, src), [[] for _ in src], torch.Generator().manual_seed(0)
    for _ in range(8):
        log_probs = state.log_probs()
        for row, p in enumerate(log_probs):
            again = next_log_probs(model, alone(src, state.sentences[row]), history[row])
            torch.testing.assert_close(p, torch.tensor(again, dtype=p.dtype))
        n = len(history)
        rows = torch.randint(n, (max(1, min(7, n + 1)),), generator=rng).tolist()   # any rows, in any order, some twice
        tokens = torch.randint(3, V, (len(rows),), generator=rng).tolist()
        history = [history[row] + [t] for row, t in zip(rows, tokens)]
        state.advance(rows, tokens)


def test_rows_of_one_sentence_do_not_copy_its_memory():
    model, src = make(), sources(2)
    state = State(model, src)
    state.log_probs()
    state.advance([0, 0, 1], [4, 5, 6])
    state.log_probs()
    memory, keys = state.memory, [read.key for _, read in state.cache.layers]
    state.advance([1, 0, 2], [4, 5, 6])
    assert state.memory is memory and all(read.key is k for (_, read), k in zip(state.cache.layers, keys))
    state.advance([0, 2], [4, 5])
    assert len(state.memory) == len(state.mask) == 2 and state.sentences == [0, 1]


def endless(**kind):
    "A model whose every state is far from EOS."
    model = make(**kind)
    last_norm(model).bias += 1
    model.output.weight[EOS] = -9
    return model


def test_what_does_not_end_is_cut_off():
    model, src = endless(), sources(4)
    for size, n_best in ((1, 1), (4, 1), (4, 4)):
        for h, limit in zip(beam_search(model, src, size, max_extra=7, n_best=n_best), length_limits(src, 7, 40)):
            assert [len(x.ids) for x in h] == [limit] * n_best and all(EOS not in x.ids for x in h)
            assert [x.score for x in h] == pytest.approx([x.log_prob / length_penalty(limit, 0.6) for x in h])
    assert [len(h.ids) for h in greedy(model, src, 7)] == length_limits(src, 7, 40)
    h = greedy(model, src, 7)[0]
    assert h.log_prob == pytest.approx(score_of(model, alone(src, 0), h.ids), abs=1e-9)


def test_positions_are_the_last_limit():
    model, src = endless(max_len=9, positions='learned'), sources(6)
    assert length_limits(src, 50, 9) == [9] * 6
    assert [len(h.ids) for h in greedy(model, src)] == [9] * 6
    assert [len(best[0].ids) for best in beam_search(model, src)] == [9] * 6


def test_cut_off_hypotheses_only_fill_up():
    beam = Beam(size=3, alpha=0., limit=2, n_best=3)
    beam.grow([(0, 7, -0.1), (0, EOS, -5.), (0, 8, -6.)])
    assert beam.grow([(0, 7, -0.2), (0, 8, -0.3), (1, EOS, -7.)]) == [(0, 7), (0, 8)]
    assert beam.done() and beam.ended == [Hypothesis([], -5., -5.), Hypothesis([8], -7., -7.), Hypothesis([7, 7], -0.2, -0.2)]


def test_cut_off_by_the_plain_definition():
    for seed in (0, 5):         # near limits, so that for some sentences fewer have ended than are wanted
        model, src = make(seed), sources(6)
        for i, found in enumerate(beam_search(model, src, 4, max_extra=0, n_best=4)):
            same(found, plain_beam(model, alone(src, i), 4, 0.6, max(1, int((src[i] != PAD).sum())), 4))


@pytest.mark.parametrize('search', [greedy, beam_search])
def test_edges(search):
    model = make()
    assert search(model, sources()[:0]) == []
    [h] = search(model, torch.tensor([[EOS]]))
    [again] = search(model, torch.tensor([[EOS, PAD, PAD]]))
    ids = [[x.ids for x in (y if isinstance(y, list) else [y])] for y in (h, again)]
    assert ids[0] == ids[1]                                         # padding is not seen
    assert len(search(model, torch.tensor([[PAD, PAD], [5, EOS]]), max_extra=0)) == 2
    assert length_limits(torch.tensor([[PAD, PAD], [5, EOS]]), 0, 40) == [1, 2]
    with pytest.raises(ValueError, match='max_extra=-3 must not be negative'): search(model, sources(), max_extra=-3)
    with pytest.raises(ValueError, match='max_len=40'): search(model, torch.full((1, 41), 5))


@pytest.mark.parametrize('settings, message', [
    (dict(n_best=0), 'n_best=0 must lie between 1 and beam_size=4'), (dict(n_best=5), 'n_best=5 must lie between'),
    (dict(beam_size=0), 'beam_size=0'), (dict(beam_size=-2, n_best=-2), 'beam_size=-2'),
    (dict(alpha=-0.1), 'alpha=-0.1 must not be negative'), (dict(alpha=math.nan), 'alpha=nan')])
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message): beam_search(make(), sources(), **settings)


def test_pad_and_bos_are_never_written():
    model = make(tied=False)
    last_norm(model).bias += 1
    model.output.weight[[PAD, BOS]] = 9                             # it would like nothing better
    for h, best in zip(greedy(model, sources(), 5), beam_search(model, sources(), max_extra=5, n_best=4)):
        assert all(not {PAD, BOS, EOS} & set(x.ids) and math.isfinite(x.log_prob) for x in [h, *best])


def test_n_best_are_different_and_sorted():
    model, src = make(), sources()
    found = beam_search(model, src, 6, n_best=6)
    for best, [winner] in zip(found, beam_search(model, src, 6)):
        assert len({tuple(h.ids) for h in best}) == 6
        n_ended = sum(len(h.ids) < 40 for h in best)        # what was cut off has all positions, and comes last
        for part in best[:n_ended], best[n_ended:]:
            assert [h.score for h in part] == sorted((h.score for h in part), reverse=True)
        assert best[0].ids == winner.ids


@pytest.mark.parametrize('vocab_size', [4, 5, 6])
def test_a_vocabulary_smaller_than_the_beam(vocab_size):
    model, src = make(2, 20, vocab_size=vocab_size), torch.tensor([[3, EOS], [EOS, PAD]])
    for i, found in enumerate(beam_search(model, src, 8, 0.6, 3, 5)):
        same(found, plain_beam(model, alone(src, i), 8, 0.6, [5, 4][i], 5))


@pytest.mark.parametrize('v, size', [(11, 3), (5, 4), (3, 8), (40, 1)])
def test_best_continuations_are_the_best(v, size):
    torch.manual_seed(v)
    beams, widths = [], [min(size, w) for w in (1, 3, 2, 8, 1)]
    for w in widths:
        beams.append(Beam(size, 0.6, 9, 1))
        beams[-1].live = [([7], -0.3 * i) for i in range(w)]
    log_probs, row = torch.randn(sum(widths), v, dtype=torch.float64).log_softmax(-1), 0
    log_probs[:, 0] = -math.inf
    for beam, found in zip(beams, best_continuations(log_probs, beams)):
        every = [(i, t, log_probs[row + i, t].item() + p) for i, (_, p) in enumerate(beam.live) for t in range(1, v)]
        every.sort(key=lambda c: -c[2])
        assert [c[:2] for c in found] == [c[:2] for c in every[:size]]
        assert [c[2] for c in found] == pytest.approx([c[2] for c in every[:size]])
        row += len(beam.live)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_scores_are_at_least_single_precision(dtype):
    model, src = make().to(dtype), sources()
    assert State(model, src).log_probs().dtype == torch.float32
    assert all(math.isfinite(h.log_prob) for h in greedy(model, src, 5))
    assert all(math.isfinite(best[0].score) for best in beam_search(model, src, max_extra=5))


def test_decoding_leaves_the_model_alone():
    model, src = make(), sources()
    before, given = copy.deepcopy(model.state_dict()), src.clone()
    first = beam_search(model, src, n_best=2)
    assert beam_search(model, src, n_best=2) == first and torch.equal(src, given) and not model.training
    for key, w in model.state_dict().items(): assert torch.equal(w, before[key])
    model.decode(torch.full((len(src), 1), BOS), model.encode(src), padding_mask(src, PAD))  # gradients are on again outside


@pytest.mark.parametrize('alpha', [0., 0.6, 1.])
def test_length_penalty(alpha):
    assert length_penalty(1, alpha) == 1 and length_penalty(7, alpha) == pytest.approx(2 ** alpha)
    if alpha: assert length_penalty(8, alpha) > length_penalty(7, alpha)
