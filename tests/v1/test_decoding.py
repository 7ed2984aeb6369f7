"Decoding changes how fast a translation is found, never which: checked on random and on trained models."
import copy
import functools
import itertools
import math
import threading
from types import SimpleNamespace

import pytest
import torch

from annotated_transformer.v1 import decoding
from annotated_transformer.v1.attention import record_attention
from annotated_transformer.v1.batches import collate, pad_rows
from annotated_transformer.v1.decoding import (
    BLOCK, LITTLE, Beams, DecodingConfig, Endings, State, TreeState, beam_search, best_continuations,
    decoding_state, greedy, length_limits, length_penalty, log_probabilities, sample,
    sampling_distribution, score_translations, threads_for, who_stays)
from annotated_transformer.v1.layers import Decoder
from annotated_transformer.v1.transformer import Transformer, TransformerConfig
from annotated_transformer.v1.vocabulary import BOS, EOS, PAD

V = 11
KINDS = [dict(norm=norm, positions=positions, tied=tied) for norm, positions, tied in     # each pair of settings once
         (('post', 'sinusoidal', True), ('post', 'learned', False),
          ('pre', 'sinusoidal', False), ('pre', 'learned', True),
          ('post', 'alibi', True), ('pre', 'alibi', False),
          ('post', 'rotary', False), ('pre', 'rotary', True))]
KINDS += [dict(n_layers=1, n_heads=1), dict(n_layers=3, d_model=12, n_heads=3, d_ff=5), dict(d_k=3, d_v=5),
          dict(d_k=6, d_v=2, positions='rotary'), dict(activation='gelu', output_bias=True)]
STATES = [State, TreeState]


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
    return model.eval().requires_grad_(False)


def make(seed=0, steps=40, dtype=torch.float64, **kind): return copy.deepcopy(trained(seed, steps, **kind)).to(dtype)


def last_norm(model):
    return model.decoder.norm if model.config.norm == 'pre' else model.decoder.layers[-1].add_norms[-1].norm


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


def allowed(config, ids, token, prefix):
    "The rules, one token at a time."
    if len(ids) < len(prefix): return token == prefix[len(ids)]
    n = config.no_repeat_ngram
    grams = [ids[i:i + n] for i in range(len(ids) - n + 1)] if n else []
    return not (token == EOS and len(ids) < config.min_len) and (ids + [token])[-n:] not in grams if n else \
        not (token == EOS and len(ids) < config.min_len)


def plain_greedy(model, src, limit, config=DecodingConfig(), prefix=()):
    ids = []
    while len(ids) < limit and EOS not in ids:
        p = [q if allowed(config, ids, t, prefix) else -math.inf for t, q in enumerate(next_log_probs(model, src, ids))]
        if max(p) == -math.inf: break
        ids.append(p.index(max(p)))
    return ids


def plain_beam(model, src, config, limit, prefix=()):
    """The definition: one sentence, everything computed anew and sorted,
    no end before the limit (or before `patience` says)."""
    c, live, ended, length = config, [(0., [])], [], 0
    def penalty(n): return ((c.length_offset + n) / (c.length_offset + 1)) ** c.alpha
    enough = max(c.n_best, round(c.patience * c.beam_size)) if c.patience else math.inf
    while live and length < limit and len(ended) < enough:
        candidates = [(p + q, ids + [t]) for p, ids in live for t, q in enumerate(next_log_probs(model, src, ids))
                      if q > -math.inf and allowed(c, ids, t, prefix)]
        if not candidates: break
        best, length = sorted(candidates, reverse=True)[:2*c.beam_size], length + 1
        ended += [(p / penalty(length), ids[:-1], p) for p, ids in best[:c.beam_size] if ids[-1] == EOS]
        live = [(p, ids) for p, ids in best if ids[-1] != EOS][:c.beam_size]
    found = sorted(ended, reverse=True)[:c.n_best]
    return found + ([(p / penalty(length), ids, p) for p, ids in live[:c.n_best - len(found)]]
                    if len(ended) < enough else [])


def same(found, expected):
    assert [h.ids for h in found] == [ids for _, ids, _ in expected]
    assert [h.score for h in found] == pytest.approx([s for s, _, _ in expected], abs=1e-9)
    assert [h.log_prob for h in found] == pytest.approx([p for _, _, p in expected], abs=1e-9)


def limit_of(src, max_extra, model): return int(length_limits(src, max_extra, model.config.max_len)[0])


@pytest.fixture(params=STATES, ids=['rows', 'trees'])
def state(request, monkeypatch):
    "Both ways to remember."
    monkeypatch.setattr(decoding, 'TreeState', request.param)
    return request.param


# --- what is found, against the definitions

@pytest.mark.parametrize('kind', KINDS, ids=name)
def test_greedy_is_the_likeliest_token_again_and_again(kind):
    model, src = make(**kind), sources()
    for i, h in enumerate(greedy(model, src, max_extra=6)):
        expected = plain_greedy(model, alone(src, i), limit_of(alone(src, i), 6, model))
        assert h.ids == [t for t in expected if t != EOS]
        assert h.log_prob == pytest.approx(score_of(model, alone(src, i), expected), abs=1e-9)
        assert h.score == pytest.approx(h.log_prob / length_penalty(len(expected), 0.6), abs=1e-9)


@pytest.mark.parametrize('kind', KINDS, ids=name)
def test_beam_search_is_its_definition(kind):
    model, src = make(**kind), sources(4)
    for config in (DecodingConfig(3, n_best=2, max_extra=2),
                   DecodingConfig(2, alpha=1., length_offset=0., patience=1., max_extra=2)):
        for i, found in enumerate(beam_search(model, src, config)):
            same(found, plain_beam(model, alone(src, i), config, limit_of(alone(src, i), 2, model)))


@pytest.mark.parametrize('settings', [dict(min_len=5), dict(no_repeat_ngram=1), dict(no_repeat_ngram=2),
                                      dict(min_len=4, no_repeat_ngram=3, n_best=3)], ids=str)
def test_rules_and_prefixes_by_the_definition(settings):
    model, src, prefix = make(0, 20), sources(4), [[], [4, 4, 4], [7, 8], [3]]
    for max_extra in (0, 3):
        config = DecodingConfig(3, max_extra=max_extra, **settings)
        found, quick = beam_search(model, src, config, prefix), greedy(model, src, config, prefix)
        for i, given in enumerate(prefix):
            one, limit = alone(src, i), max(limit_of(alone(src, i), max_extra, model), len(given) + 1)
            same(found[i], plain_beam(model, one, config, limit, given))
            assert quick[i].ids == [t for t in plain_greedy(model, one, limit, config, given) if t != EOS]
            assert all(h.ids[:len(given)] == given for h in found[i])


def test_when_nothing_is_allowed_any_more():
    "Seven words that may come once each, and no end before nine: what was written when nothing was left is returned."
    model, src = make(0, 20, vocab_size=7), torch.tensor([[4, 5, EOS], [6, EOS, PAD]])
    for found in beam_search(model, src, min_len=9, no_repeat_ngram=1, n_best=4):
        assert len(found) == 4 and all(sorted(h.ids) == [3, 4, 5, 6] for h in found)
    assert all(sorted(h.ids) == [3, 4, 5, 6] and math.isfinite(h.log_prob)
               for h in greedy(model, src, min_len=9, no_repeat_ngram=1))


# --- exactness

@pytest.mark.parametrize('kind', KINDS, ids=name)
def test_both_states_remember_what_would_be_computed_anew(kind):
    """At random moves: hypotheses go on several times or not at all, change places, become more and fewer;
    sentences leave."""
    model, src = make(**kind), sources(4)
    for make_state in STATES:
        state, rng = make_state(model, src), torch.Generator().manual_seed(0)
        lines, history, last = list(range(4)), [[[]] for _ in src], torch.full((4, 1), BOS)
        for step in range(7):
            log_probs = log_probabilities(state.logits(last))
            for line, written, rows in zip(lines, history, log_probs):
                for ids, p in zip(written, rows):
                    again = next_log_probs(model, alone(src, line), ids)
                    torch.testing.assert_close(p, torch.tensor(again, dtype=p.dtype))
            k, j = last.size(1), int(torch.randint(1, 5, (), generator=rng))
            parents = torch.randint(k, (len(lines), j), generator=rng)
            state.follow(parents)
            if step in (2, 5):
                going = torch.randperm(len(lines), generator=rng)[:-1]
                state.keep(going)
                lines, history, parents = [lines[i] for i in going], [history[i] for i in going], parents[going]
            last = torch.randint(3, V, parents.shape, generator=rng)
            history = [[old[i] + [t] for i, t in zip(*pair)]
                       for old, *pair in zip(history, parents.tolist(), last.tolist())]


@pytest.mark.parametrize('kept_heads', [{}, {'0.self_attention': [1, 3], '1.cross_attention': [2]}],
                         ids=['all', 'some'])
def test_trees_that_outgrow_their_room(kept_heads):
    "Thirty steps of five hypotheses: more nodes than there were places for at first, before and after sentences leave."
    torch.manual_seed(0)
    config = TransformerConfig(
        V, n_layers=2, d_model=16, d_ff=24, n_heads=4, max_len=40, positions='alibi',
        kept_heads={f'decoder.layers.{name}': heads for name, heads in kept_heads.items()} or None)
    model, src, rng = (Transformer(config).double().eval().requires_grad_(False), sources(4),
                       torch.Generator().manual_seed(0))
    assert type(decoding_state(model, src)) is TreeState
    rows, trees = (make_state(model, src) for make_state in STATES)
    room, tokens = trees.trees.nodes.size(2), torch.full((4, 1), BOS)
    for step in range(30):
        torch.testing.assert_close(rows.logits(tokens), trees.logits(tokens))
        parents = torch.randint(tokens.size(1), (len(tokens), 5), generator=rng)
        tokens = torch.randint(3, V, parents.shape, generator=rng)
        for state in (rows, trees): state.follow(parents)
        if step in (3, 20):
            tokens = tokens[[2, 0, 1][:len(tokens) - 1]]
            for state in (rows, trees): state.keep(torch.tensor([2, 0, 1][:len(tokens)]))
    assert len(tokens) == 2 and trees.trees.nodes.size(2) > 2 * room


@pytest.mark.parametrize('steps, kind', [(40, kind) for kind in KINDS] + [(0, kind) for kind in KINDS[::5]], ids=str)
def test_trees_and_rows_find_the_same_in_single_precision(steps, kind, monkeypatch):
    model, src = make(0, steps, torch.float32, **kind), sources(8)
    def searches(): return greedy(model, src, max_extra=5), beam_search(model, src, n_best=2, max_extra=5)
    g, b = searches()
    monkeypatch.setattr(decoding, 'TreeState', State)
    again_g, again_b = searches()
    assert [h.ids for h in g] == [h.ids for h in again_g]
    assert [[h.ids for h in best] for best in b] == [[h.ids for h in best] for best in again_b]


def test_a_source_that_is_not_there():
    "Nothing but padding: its memory says nothing, and the same nothing in both ways to remember."
    model, src = make(), torch.tensor([[PAD, PAD], [5, EOS]])
    rows, trees = (make_state(model, src).logits(torch.full((2, 1), BOS)) for make_state in STATES)
    torch.testing.assert_close(rows, trees)
    torch.testing.assert_close(rows[0], State(model, src[:1]).logits(torch.full((1, 1), BOS))[0])


@pytest.mark.parametrize('kind', KINDS, ids=name)
def test_a_beam_of_one_is_greedy(kind):
    for dtype in (torch.float64, torch.float32):
        model, src = make(dtype=dtype, **kind), sources(16)
        for g, [b] in zip(greedy(model, src, max_extra=9), beam_search(model, src, beam_size=1, max_extra=9)):
            assert g.ids == b.ids and (g.log_prob, g.score) == pytest.approx((b.log_prob, b.score), abs=1e-4)


@pytest.mark.parametrize('steps', [0, 40])
def test_company_and_order_change_no_token_in_single_precision(steps):
    model, src = make(0, steps, torch.float32), sources(4)
    def searches(src):
        return zip(greedy(model, src, max_extra=3),
                   beam_search(model, src, beam_size=3, max_extra=3, n_best=2))
    by_itself = [next(searches(alone(src, i))) for i in range(4)]
    for order in itertools.permutations(range(4)):
        for i, (g, best) in zip(order, searches(src[list(order)])):
            assert g.ids == by_itself[i][0].ids and [h.ids for h in best] == [h.ids for h in by_itself[i][1]]
            assert [h.score for h in best] == pytest.approx([h.score for h in by_itself[i][1]], abs=1e-4)


@pytest.mark.parametrize('kind', [dict(), dict(norm='pre', positions='alibi'), dict(positions='rotary')], ids=name)
def test_batches_of_any_size_give_the_same_tokens(kind):
    "Sentences leave a large batch when an eighth is done, a small one at once."
    model, src = make(0, 40, torch.float32, **kind), sources(18)
    whole = [[h.ids for h in best] for best in beam_search(model, src, n_best=2, max_extra=9)]
    for size in (1, 9):
        parts = [best for rows in src.split(size) for best in beam_search(model, rows, n_best=2, max_extra=9)]
        assert [[h.ids for h in best] for best in parts] == whole


def test_words_that_are_worth_the_same():
    "Which of two equal translations is returned is not promised; its score is, in any company."
    model, src = make(0, 40, torch.float32), sources(12)
    # tied: the model cannot tell 4 from 5, nor 6 from 7
    model.output.weight[[5, 7]] = model.output.weight[[4, 6]]
    found = beam_search(model, src, max_extra=5, n_best=4)
    for i, best in enumerate(found):
        [again] = beam_search(model, alone(src, i), max_extra=5, n_best=4)
        assert [h.score for h in best] == pytest.approx([h.score for h in again], abs=1e-4)


@pytest.mark.parametrize('steps', [0, 20])
def test_a_beam_that_holds_everything_searches_everything(steps, state):
    model, src, limit = make(0, steps, vocab_size=7), torch.tensor([[4, EOS]]), 4
    texts = [list(ids) for n in range(limit) for ids in itertools.product((3, 4, 5, 6), repeat=n)]
    p = score_translations(model, src.expand(len(texts), -1), texts).tolist()
    def ranked(alpha):
        return sorted(((p / length_penalty(len(ids) + 1, alpha), ids, p) for ids, p in zip(texts, p)), reverse=True)
    for alpha in (0., 0.6):
        config = DecodingConfig(5 ** limit, alpha, max_extra=2, n_best=len(texts))
        same(beam_search(model, src, config)[0], ranked(alpha))
        same(beam_search(model, src, config, n_best=1)[0], ranked(alpha)[:1])


@pytest.mark.parametrize('steps, kind', [(40, kind) for kind in KINDS] + [(0, kind) for kind in KINDS[::5]], ids=str)
def test_scores_are_those_of_teacher_forcing(steps, kind):
    for dtype, near in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        model, src = make(0, steps, dtype, **kind), sources(6)
        found = beam_search(model, src, n_best=3, max_extra=9)
        rows = [(i, h) for i, best in enumerate(found) for h in best if len(h.ids) < limit_of(alone(src, i), 9, model)]
        if not rows and not steps: continue                         # a random model may never end
        again = score_translations(model, src[[i for i, _ in rows]], [h.ids for _, h in rows]).tolist()
        assert [h.log_prob for _, h in rows] == pytest.approx(again, abs=near) and rows
        assert [h.score for _, h in rows] == pytest.approx(
            [p / length_penalty(len(h.ids) + 1, 0.6) for (_, h), p in zip(rows, again)], abs=near)


@pytest.mark.parametrize('steps', [0, 20, 40])
@pytest.mark.parametrize('alpha', [0., 0.6, 2.])
def test_stopping_early_changes_nothing(steps, alpha, monkeypatch):
    model, src = make(5, steps), sources(20)
    settings = [DecodingConfig(size, alpha, n_best=n, max_extra=12) for size, n in ((4, 1), (6, 3))]
    def searches(): return [beam_search(model, src, config) for config in settings]
    early = searches()
    monkeypatch.setattr(Endings, 'decided', lambda *_: False)
    for before, after in zip(early, searches()):
        for best, expected in zip(before, after): same(best, [(h.score, h.ids, h.log_prob) for h in expected])


def test_stopping_early_saves_steps(monkeypatch):
    asked, logits = [], TreeState.logits
    monkeypatch.setattr(TreeState, 'logits',
                        lambda state, tokens: asked.append(tokens.numel()) or logits(state, tokens))
    model, src, rows = make(5), sources(20), []
    for patience, decided in ((0., Endings.decided), (1., Endings.decided), (0., lambda *_: False)):
        monkeypatch.setattr(Endings, 'decided', decided)
        beam_search(model, src, max_extra=12, patience=patience)
        rows.append(sum(asked) - sum(rows))
    assert rows[0] < 0.8 * rows[2] and rows[1] < 0.8 * rows[2]


# --- parts

@pytest.mark.parametrize('v, count', [(3, 4), (11, 3), (11, 40), (BLOCK, 8), (BLOCK + 1, 8),
                                      (3 * BLOCK, 300), (1000, 8)])
@pytest.mark.parametrize('few', [0, 2**30], ids=['blocks', 'all'])
def test_best_continuations_are_the_best(v, count, few, monkeypatch):
    monkeypatch.setattr(decoding, 'FEW', few)
    torch.manual_seed(v)
    scores, before = torch.randn(5, 4, v, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    before[:, 1], scores[2, :, :2] = -math.inf, -math.inf
    sums, rows, tokens = best_continuations(scores, before, count)
    expected, at = (scores + before[..., None]).flatten(1).sort(1, descending=True)
    n = min(count, 4 * v)
    assert sums.shape == (5, n) and torch.equal(sums, expected[:, :n])
    there = sums > -math.inf
    assert torch.equal((rows * v + tokens)[there], at[:, :n][there])


def grown(beams, log_prob_of, v=V):
    "One step, where only these continuations of one sentence are possible: {(place, token): log-probability}."
    log_probs = torch.full((1, beams.log_prob.size(1), v), -math.inf)
    for (place, token), p in log_prob_of.items(): log_probs[0, place, token] = p
    return beams.grow(log_probs)


def one_beam(limit, **settings): return Beams(torch.tensor([limit]), DecodingConfig(**settings))


def test_a_few_bad_endings_do_not_stop_a_search():
    "With `patience` 1, stop when `beam_size` have ended, this search ends with a translation of one token."
    for patience, ids in ((0., [7] * 7), (1., [7])):
        beams = one_beam(60, beam_size=2, patience=patience)
        for length in range(1, 8):
            assert not beams.done[0]
            grown(beams, {(0, 7): -0.01, (0, EOS): -9.})
            if beams.done[0]: break
        else:
            grown(beams, {(0, EOS): -0.03, (0, 8): -7., (0, 9): -7.5})
        assert beams.done == [True] and beams.ended.of[0][0].ids == ids


def test_the_best_that_do_not_end_go_on():
    "Two of the first three end, so the fourth and fifth go on; an end below the third place is none."
    beams = one_beam(9, beam_size=3)
    grown(beams, {(0, 5): -1., (0, 6): -2., (0, 7): -3.})
    parents = grown(beams, {(0, 8): -1., (0, EOS): -1.5, (1, EOS): -0.6, (1, 5): -1., (2, 9): -2., (2, EOS): -1.})
    assert [h.ids for h in beams.ended.of[0]] == [[5]] and beams.ended.counts == [2]
    assert parents.tolist() == [[0, 1, 2]] and beams.ids[0].tolist() == [[5, 8], [6, 5], [7, 9]]
    assert beams.log_prob[0].tolist() == pytest.approx([-2., -3., -5.])


def test_cut_off_hypotheses_only_fill_up():
    beams = one_beam(2, beam_size=3, n_best=3, alpha=0.)
    grown(beams, {(0, 7): -0.1, (0, EOS): -5., (0, 8): -6.})
    grown(beams, {(0, 7): -0.1, (0, 8): -0.2, (1, EOS): -1.})
    assert beams.done == [True] and [h.ids for h in beams.ended.of[0]] == [[], [8], [7, 7]]
    assert [h.score for h in beams.ended.of[0]] == pytest.approx([-5., -7., -0.2])


def test_who_stays():
    for n, done, left in ((64, 7, None), (64, 8, 56), (4, 1, 3), (1, 1, 0), (3, 0, None)):
        stays = who_stays([True] * done + [False] * (n - done))
        assert stays is None if left is None else stays == list(range(done, n))


def test_threads_are_given_back():
    "By searches side by side, whoever ends first, and by one that fails; large ones change nothing."
    before, model, cpu = torch.get_num_threads(), make(), torch.device('cpu')
    torch.set_num_threads(2)
    try:
        inside, may_end, seen = threading.Barrier(3), threading.Event(), {}
        def search(name, wait):
            with threads_for(model, 1, cpu):
                inside.wait()
                if wait: may_end.wait()
                if not wait: seen['inside'] = torch.get_num_threads()
            seen[name] = torch.get_num_threads()
        both = [threading.Thread(target=search, args=args) for args in (('first', False), ('last', True))]
        for thread in both: thread.start()
        inside.wait()
        both[0].join()
        may_end.set()
        both[1].join()
        assert seen == {'inside': 1, 'first': 2, 'last': 2} and torch.get_num_threads() == 2
        for args in ((LITTLE, cpu), (1, torch.device('meta'))):
            with threads_for(model, *args): assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match='max_len'): beam_search(model, torch.full((1, 41), 5))
        beam_search(model, sources(2), max_extra=2)
        assert torch.get_num_threads() == 2
    finally: torch.set_num_threads(before)


def test_a_decoder_that_is_watched_or_altered_is_asked_in_the_usual_way():
    model, src = make(), sources(3)
    assert type(decoding_state(model, src)) is TreeState
    with record_attention(model) as maps: beam_search(model, src, max_extra=2)
    assert all(maps[f'decoder.layers.{i}.{kind}_attention'] for i in (0, 1) for kind in ('self', 'cross'))
    seen, handle = [], None
    handle = model.decoder.layers[0].cross_attention.register_forward_hook(lambda *_: seen.append(1))
    greedy(model, src, max_extra=2)
    handle.remove()
    class Other(type(model.decoder.layers[0].self_attention)): pass
    model.decoder.layers[1].self_attention.__class__ = Other
    assert seen and type(decoding_state(model, src)) is State


def test_a_model_with_another_decode_is_asked_in_the_usual_way():
    class Shouting(Transformer):
        def decode(self, *args): return -super().decode(*args)
    class Loud(Decoder):
        def forward(self, *args, **kwargs): return -super().forward(*args, **kwargs)
    model, src = make(), sources(2)[:1]
    expected = [plain_greedy(model, src, 6)]
    for part, other in ((model.decoder, Loud), (model, Shouting)):
        own, part.__class__ = type(part), other
        expected.append(plain_greedy(model, src, 6))
        [found] = greedy(model, src, max_extra=6 - src.size(1))
        part.__class__ = own
        assert found.ids == [t for t in expected[-1] if t != EOS] and expected[-1] != expected[0]


def test_a_model_that_remembers_in_its_own_way():
    "Bigrams: a search needs no more than `DecodingState`."
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(0))
    table[:, EOS] -= 3
    class Bigrams(torch.nn.Module):
        config = SimpleNamespace(vocab_size=V, max_len=6)
        def decoding_state(self, src): return self
        def logits(self, tokens): return table[tokens]
        def follow(self, parents): pass
        def keep(self, lines): pass
    [[best]], [quick] = beam_search(Bigrams(), sources(2)[:1]), greedy(Bigrams(), sources(2)[:1])
    ids, p = [BOS], 0.
    while ids[-1] != EOS and len(ids) <= 6:
        log_probs = log_probabilities(table[ids[-1]].clone())
        ids.append(int(log_probs.argmax()))
        p += float(log_probs[ids[-1]])
    assert quick.ids == [t for t in ids[1:] if t != EOS] and quick.log_prob == pytest.approx(p) and len(quick.ids) > 2
    assert best.score >= quick.score or len(quick.ids) == 6


# --- sampling

@pytest.mark.parametrize('settings', [(1., 0, 1.), (0.5, 0, 1.), (1., 3, 1.), (1., 0, 0.7), (1., 0, 0.01),
                                      (2., 4, 0.8), (1., 99, 0.999)], ids=str)
def test_what_is_drawn_from_by_its_definition(settings):
    temperature, top_k, top_p = settings
    log_probs = torch.randn(5, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for row, found in zip(log_probs, sampling_distribution(log_probs, *settings)):
        weights = {t: math.exp(p / temperature) for t, p in enumerate(row.tolist())}
        ranked, kept, reached = sorted(weights, key=lambda t: -weights[t])[:top_k or None], {}, 0.
        whole = sum(weights[t] for t in ranked)
        for t in ranked:                                            # the likeliest, until together they reach top_p
            if reached >= top_p: break
            kept[t], reached = weights[t], reached + weights[t] / whole
        expected = torch.tensor([kept.get(t, 0.) / sum(kept.values()) for t in range(V)], dtype=torch.float64)
        torch.testing.assert_close(found, expected)


def test_of_equals_no_more_than_top_k():
    for top_k in range(1, 6):
        found = sampling_distribution(torch.tensor([[0., -1, 0, 0, 0, -2], [0.] * 6]).log_softmax(-1), top_k=top_k)
        assert [(row > 0).sum() for row in found] == [top_k] * 2
        assert found[0, 1] == 0 or top_k == 5


def test_counts_come_from_the_distribution():
    model, src = make(0, 20, torch.float32), sources(2)[:1]
    for settings in (dict(), dict(temperature=0.5), dict(top_k=3), dict(top_p=0.7),
                     dict(temperature=2., top_k=4, top_p=0.8)):
        g = torch.Generator().manual_seed(1)
        drawn = sample(model, src.expand(4000, -1), generator=g, max_extra=0, **settings)
        first = torch.tensor([(h.ids + [EOS])[0] for h in drawn]).bincount(minlength=V) / 4000
        p = sampling_distribution(torch.tensor(next_log_probs(model, src, [])), **settings)
        assert ((first > 0) <= (p > 0)).all()
        torch.testing.assert_close(first, p, atol=0.03, rtol=0)


def test_a_seed_repeats_and_scores_are_the_models_own():
    model, src = make(0, 40, torch.float64), sources(8)
    once, again = ([sample(model, src, temperature=0.8, top_p=0.9, generator=torch.Generator().manual_seed(s))
                    for s in (1, 2)] for _ in range(2))
    assert once == again and once[0] != once[1]
    for i, h in enumerate(once[0]):
        if len(h.ids) < 40:
            assert (h.log_prob == pytest.approx(score_of(model, alone(src, i), h.ids + [EOS]), abs=1e-9)
                    and h.score == h.log_prob)
    assert [h.ids for h in sample(model, src, top_k=1)] == [h.ids for h in greedy(model, src)]
    assert all(h.ids[:2] == [5, 6] for h in sample(model, src, prefix=[[5, 6]] * 8))


@pytest.mark.parametrize('settings', [dict(temperature=0.), dict(temperature=-1.), dict(top_k=-1),
                                      dict(top_p=0.), dict(top_p=1.1)], ids=str)
def test_nothing_to_draw_from(settings):
    with pytest.raises(ValueError, match=f'{list(settings)[0]}={list(settings.values())[0]}'):
        sample(make(), sources(), **settings)


# --- edges

def endless(**kind):
    "A model whose every state is far from EOS."
    model = make(**kind)
    last_norm(model).bias += 1
    model.output.weight[EOS] = -9
    return model


def test_what_does_not_end_is_cut_off():
    model, src = endless(), sources(4)
    for size, n_best in ((1, 1), (4, 1), (4, 4)):
        for h, limit in zip(beam_search(model, src, beam_size=size, max_extra=7, n_best=n_best),
                            length_limits(src, 7, 40).tolist()):
            assert [len(x.ids) for x in h] == [limit] * n_best and all(EOS not in x.ids for x in h)
            assert [x.score for x in h] == pytest.approx([x.log_prob / length_penalty(limit, 0.6) for x in h])
    assert [len(h.ids) for h in greedy(model, src, max_extra=7)] == length_limits(src, 7, 40).tolist()
    h = greedy(model, src, max_extra=7)[0]
    assert h.log_prob == pytest.approx(score_of(model, alone(src, 0), h.ids), abs=1e-9)


def test_positions_are_the_last_limit():
    model, src = endless(max_len=9, positions='learned'), sources(6)
    assert length_limits(src, 50, 9).tolist() == [9] * 6
    assert [len(h.ids) for h in greedy(model, src)] == [9] * 6
    assert [len(best[0].ids) for best in beam_search(model, src)] == [9] * 6
    assert [len(best[0].ids) for best in beam_search(model, src[:1], prefix=[[5] * 8])] == [9]


@pytest.mark.parametrize('search', [greedy, beam_search, sample])
def test_edges(search, state):
    model = make()
    assert search(model, sources()[:0]) == []
    if search is not sample:
        ids = [[x.ids for x in (y if isinstance(y, list) else [y])] for src in ([[EOS]], [[EOS, PAD, PAD]])
               for y in search(model, torch.tensor(src))]
        assert ids[0] == ids[1]                                     # padding is not seen
    assert len(search(model, torch.tensor([[PAD, PAD], [5, EOS]]), max_extra=0)) == 2
    assert length_limits(torch.tensor([[PAD, PAD], [5, EOS]]), 0, 40).tolist() == [1, 2]
    for wrong, message in (([[]], '1 beginnings for 7 sentences'), ([[V]] * 7, 'ids of words, from 3 to 10'),
                           ([[EOS]] * 7, 'ids of words'), ([[5] * 40] * 7, 'no room in max_len=40')):
        with pytest.raises(ValueError, match=message): search(model, sources(), prefix=wrong)
    with pytest.raises(ValueError, match='max_extra=-3'): search(model, sources(), max_extra=-3)
    with pytest.raises(ValueError, match='max_len=40'): search(model, torch.full((1, 41), 5))


@pytest.mark.parametrize('settings, message', [
    (dict(n_best=0), 'n_best=0 must be a whole number from 1 on'),
    (dict(n_best=5), 'n_best=5 must lie between 1 and beam_size=4'),
    (dict(beam_size=0), 'beam_size=0'), (dict(min_len=-1), 'min_len=-1'),
    (dict(alpha=-0.1), 'alpha=-0.1 must be a number, and not negative'), (dict(alpha=math.nan), 'alpha=nan'),
    (dict(length_offset=-1.), 'length_offset=-1'), (dict(patience=math.inf), 'patience=inf'),
    (dict(no_repeat_ngram=-2), 'no_repeat_ngram=-2')])
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message): DecodingConfig(**settings)
    with pytest.raises(ValueError, match=message): beam_search(make(), sources(), **settings)


def test_translations_that_cannot_be_scored():
    model, src = make(), sources(2)
    with pytest.raises(ValueError, match='1 translations of 2 sources'): score_translations(model, src, [[5]])
    with pytest.raises(ValueError, match='no PAD, BOS or EOS'): score_translations(model, src, [[5], [5, EOS]])
    with pytest.raises(ValueError, match='max_len=40'): score_translations(model, src, [[5], [5] * 40])


def test_pad_and_bos_are_never_written():
    model = make(tied=False)
    last_norm(model).bias += 1
    model.output.weight[[PAD, BOS]] = 9                             # it would like nothing better
    for h, best in zip(greedy(model, sources(), max_extra=5), beam_search(model, sources(), max_extra=5, n_best=4)):
        assert all(not {PAD, BOS, EOS} & set(x.ids) and math.isfinite(x.log_prob) for x in [h, *best])


def test_n_best_are_different_and_sorted():
    model, src = make(), sources()
    found = beam_search(model, src, beam_size=6, n_best=6)
    for best, [winner] in zip(found, beam_search(model, src, beam_size=6)):
        assert len({tuple(h.ids) for h in best}) == 6
        n_ended = sum(len(h.ids) < 40 for h in best)        # what was cut off has all positions, and comes last
        for part in best[:n_ended], best[n_ended:]:
            assert [h.score for h in part] == sorted((h.score for h in part), reverse=True)
        assert best[0].ids == winner.ids


@pytest.mark.parametrize('vocab_size', [4, 5, 6])
def test_a_vocabulary_smaller_than_the_beam(vocab_size, state):
    model, src = make(2, 20, vocab_size=vocab_size), torch.tensor([[3, EOS], [EOS, PAD]])
    config = DecodingConfig(8, max_extra=3, n_best=5)
    for i, found in enumerate(beam_search(model, src, config)):
        same(found, plain_beam(model, alone(src, i), config, [5, 4][i]))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_at_least_single_precision(dtype, state):
    model, src = make(dtype=dtype), sources()
    assert log_probabilities(decoding_state(model, src).logits(torch.full((7, 1), BOS))).dtype == torch.float32
    assert all(math.isfinite(h.log_prob) for h in greedy(model, src, max_extra=5))
    assert all(math.isfinite(best[0].score) for best in beam_search(model, src, max_extra=5))


def test_decoding_leaves_the_model_alone(state):
    model, src = make(), sources()
    before, given = copy.deepcopy(model.state_dict()), src.clone()
    first = beam_search(model, src, n_best=2)
    assert beam_search(model, src, n_best=2) == first and torch.equal(src, given) and not model.training
    for key, w in model.state_dict().items(): assert torch.equal(w, before[key])
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize('alpha', [0., 0.6, 1.])
def test_length_penalty(alpha):
    assert length_penalty(1, alpha) == 1 and length_penalty(7, alpha) == pytest.approx(2 ** alpha)
    if alpha: assert length_penalty(8, alpha) > length_penalty(7, alpha)
    assert length_penalty(7, alpha, offset=0.) == pytest.approx(7 ** alpha)


@pytest.mark.parametrize('state', STATES)
def test_a_source_of_nothing_but_padding_stays_finite_in_16_bits(state):
    "Low numbers are added to scores: together they must not leave the range of floats."
    model, src = trained(0, 20), torch.tensor([[5, 6, 7, EOS], [PAD, PAD, PAD, PAD]])
    with torch.inference_mode(), torch.autocast('cpu', torch.bfloat16):
        assert state(model, src).logits(torch.full((2, 1), BOS)).isfinite().all()
        assert [len(found) for found in beam_search(model, src, beam_size=2, max_extra=2)] == [1, 1]
