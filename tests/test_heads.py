"Models without some of their heads: equal to ablating those heads, smaller, saved, searched and trained on."
import copy
import json
from dataclasses import asdict, replace

import pytest
import torch
from torch.testing import assert_close

from annotated_transformer import decoding
from annotated_transformer.attention_maps import attention_maps
from annotated_transformer.batches import Batch
from annotated_transformer.causal_tests import head_outputs
from annotated_transformer.checkpoints import load_model, save_model
from annotated_transformer.heads import (
    HEAD_KINDS, HardConcrete, Head, PrunedAttention, PrunedConfig, PrunedTransformer, attention_names, close_gates,
    gated_heads, gradient_importance, heads_of, leave_one_out, normalized, prune_heads, pruning_curve,
    rank_correlation, tune_gates, without_heads)
from annotated_transformer.inference import DecoderState, beam_search, greedy
from annotated_transformer.kernels import accelerate
from annotated_transformer.relative_positions import RelativeConfig, RelativeTransformer
from annotated_transformer.training import batch_loss, make_optimizer, train_step, validate
from annotated_transformer.transformer import Transformer, TransformerConfig, count_parameters
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import BOS, EOS, PAD

SMALL = TransformerConfig(vocab_size=29, n_layers=2, d_model=16, d_ff=20, n_heads=4, dropout=0.0, max_len=24)
VARIANTS = [{}, {'norm': 'pre'}, {'positions': 'learned', 'tied': False}, {'d_k': 6, 'd_v': 3},
            {'n_heads': 3, 'd_k': 4, 'd_v': 5, 'positions': 'none'}]


def new_model(seed=0, **changes):
    torch.manual_seed(seed)
    model = Transformer(replace(SMALL, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.5, 0.3) # a bias of 0 would hide mistakes
    return model


@pytest.fixture
def batch():
    torch.manual_seed(0)
    src = torch.randint(4, 29, (3, 7))
    tgt = torch.randint(4, 29, (3, 6))
    src[:, -1] = EOS
    tgt[:, 0] = BOS
    src[1, 3:] = torch.tensor([EOS, PAD, PAD, PAD])
    tgt[1, 3:] = PAD
    return Batch(src, tgt)


def some_heads(model, seed=0):
    "A third of all heads, and all heads of one attention of each kind."
    torch.manual_seed(seed)
    heads = heads_of(model)
    drawn = {heads[i] for i in torch.randperm(len(heads))[:len(heads) // 3].tolist()}
    last = {heads_of(model, kind)[-1].attention for kind in HEAD_KINDS}
    return sorted(drawn | {head for head in heads if head.attention in last})


@torch.no_grad()
def logits(model, batch):
    return model(batch.src, batch.tgt_in)


@pytest.mark.parametrize('changes', VARIANTS, ids=str)
def test_a_pruned_model_equals_the_whole_model_without_those_heads(changes, batch):
    model = new_model(**changes)
    heads = some_heads(model)
    pruned = prune_heads(model, heads)
    with without_heads(model, heads):
        assert_close(logits(pruned, batch), logits(model, batch))
    assert (logits(pruned, batch) - logits(model, batch)).abs().max() > 1e-3
    c = model.config
    d_k = c.d_k or c.d_model // c.n_heads
    d_v = c.d_v or c.d_model // c.n_heads
    per_head = (c.d_model + 1) * (2 * d_k + d_v) + d_v * c.d_model
    assert count_parameters(model) - count_parameters(pruned) == len(heads) * per_head
    assert heads_of(pruned) == [head for head in heads_of(model) if head not in heads]


@pytest.mark.parametrize('changes', VARIANTS, ids=str)
def test_searches_find_what_the_ablated_model_finds(changes, batch):
    model = new_model(**changes)
    one_of_each = [head for head in heads_of(model) if head.number == 1]
    for heads in (some_heads(model) + one_of_each, heads_of(model, 'decoder')):
        pruned = prune_heads(model, heads)
        fast = accelerate(copy.deepcopy(pruned))
        reference = decoding.greedy(pruned, batch.src, max_extra_tokens=4)
        assert [found.ids for found in greedy(fast, batch.src, max_extra_tokens=4)] == reference
        with without_heads(model, heads):
            expected = beam_search(model, batch.src, max_extra_tokens=4, n_best=2)
        for ours, theirs in zip(beam_search(fast, batch.src, max_extra_tokens=4, n_best=2), expected):
            assert [x.ids for x in ours] == [x.ids for x in theirs]
            assert [x.log_prob for x in ours] == pytest.approx([x.log_prob for x in theirs], abs=1e-3)


def test_the_cache_gives_what_a_complete_pass_gives(batch):
    model = new_model()
    name = 'decoder.layers.0.self_attention'
    heads = [head for head in heads_of(model) if head.number == 2 or head.attention == name]
    pruned = prune_heads(model, heads)
    expected = logits(pruned, batch)
    state = DecoderState(pruned, batch.src)
    for t in range(3):
        with torch.no_grad():
            assert_close(state.logits(batch.tgt[:, t:t + 1])[:, 0], expected[:, t], atol=1e-4, rtol=1e-4)
        state.reorder(torch.zeros(3, 1, dtype=torch.long))


def test_a_long_sentence_passes_the_fused_kernel():
    "Fused attention takes another path for more than 40 keys, also where no head is left."
    model = new_model(max_len=64)
    pruned = prune_heads(model, some_heads(model))
    src = torch.randint(4, 29, (2, 50))
    tgt = torch.randint(4, 29, (2, 48))
    fast = accelerate(copy.deepcopy(pruned))
    with torch.no_grad():
        assert_close(fast(src, tgt), pruned(src, tgt), atol=1e-4, rtol=1e-4)


def test_without_any_head_only_biases_remain(batch):
    model = new_model()
    bare = prune_heads(model, heads_of(model))
    assert heads_of(bare) == []
    other = Batch(batch.src.roll(1, 0), batch.tgt)
    assert_close(logits(bare, other), logits(bare, batch)) # the decoder receives nothing from the source
    assert gradient_importance(bare, [batch]) == {}
    assert prune_heads(bare, []).config == bare.config
    batch_loss(bare, batch).backward()


def test_pruning_twice_is_pruning_once(batch):
    model = new_model()
    heads = [head for head in heads_of(model) if head.number in (1, 2)]
    first = [head for head in heads if head.number == 1]
    second = [head for head in heads if head.number == 2]
    twice = prune_heads(prune_heads(model, first), second)
    once = prune_heads(model, heads)
    assert twice.config == once.config
    for ours, theirs in zip(twice.parameters(), once.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match='the model has no Head'):
        prune_heads(once, heads[:1])


def test_the_copy_shares_nothing_with_the_original(batch):
    model = new_model(n_layers=1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    pruned = prune_heads(model, some_heads(model))
    own = {p.data_ptr() for p in pruned.parameters() if p.numel()}
    assert not own & {p.data_ptr() for p in model.parameters()}
    assert pruned.lm_head.weight is pruned.src_embed.weight # tied as before
    gradient_importance(model, [batch])
    leave_one_out(model, lambda m: validate(m, [batch]))
    tune_gates(model, [batch] * 2, heads_of(model), 0.1)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_pruned_model_is_saved_and_loaded(tmp_path, batch):
    model = new_model()
    pruned = prune_heads(model, some_heads(model))
    save_model(pruned, tmp_path / 'small')
    fields = json.loads((tmp_path / 'small/config.json').read_text())
    assert fields['kind'] == 'pruned'
    again = load_model(tmp_path / 'small')
    assert type(again) is PrunedTransformer and again.config == pruned.config
    assert torch.equal(logits(again, batch), logits(pruned, batch))
    assert len({pruned.config, again.config, PrunedConfig(**asdict(SMALL))}) <= 2 # configs can be hashed
    save_model(model, tmp_path / 'whole')
    (tmp_path / 'whole/config.json').write_text(json.dumps(fields))
    with pytest.raises(ValueError, match='does not fit its config.json'):
        load_model(tmp_path / 'whole')


def test_a_config_names_what_is_wrong():
    name = attention_names(SMALL)[0]
    for kept, message in (({'encoder.layers.7.self_attention': [0]}, "names 'encoder.layers.7.self_attention', but"),
                          ({name: [4]}, 'different numbers from 0 to 3'), ({name: [0, 0]}, r'\[0, 0\]'),
                          ({name: [-1]}, r'\[-1\]'), ({name: ['a']}, "'a'")):
        with pytest.raises(ValueError, match=message):
            PrunedConfig(**asdict(SMALL) | {'kept_heads': kept})
    config = PrunedConfig(**asdict(SMALL) | {'kept_heads': {attention_names(SMALL)[5]: [], name: [2, 0]}})
    assert config.kept_heads == {name: [0, 2], attention_names(SMALL)[5]: []}
    assert PrunedConfig(**json.loads(json.dumps(asdict(config)))) == config


def test_models_of_another_kind_are_refused():
    sizes = asdict(SMALL) | {'positions': 'alibi'}
    with pytest.raises(ValueError, match='takes a Transformer, not a RelativeTransformer'):
        prune_heads(RelativeTransformer(RelativeConfig(**sizes)), [])
    with pytest.raises(ValueError, match="'middle' is not a kind of head"):
        heads_of(new_model(), 'middle')


def test_maps_have_zeros_in_the_places_of_removed_heads(batch):
    model = new_model()
    heads = some_heads(model)
    pruned = prune_heads(model, heads)
    src = batch.src[:1]
    tgt = batch.tgt[:1]
    maps = dict(zip(HEAD_KINDS, attention_maps(pruned, src, tgt)))
    with without_heads(model, heads):
        expected = dict(zip(HEAD_KINDS, attention_maps(model, src, tgt)))
    for head in heads_of(model):
        ours = maps[head.kind][head.layer, head.number]
        if head in heads:
            assert ours.abs().max() == 0
        else:
            assert_close(ours, expected[head.kind][head.layer, head.number])


def test_gates_scale_the_parts_of_a_sum(batch):
    model = new_model()
    name = attention_names(SMALL)[0]
    mha = model.get_submodule(name)
    x = torch.randn(2, 5, 16)
    def output(gate):
        with torch.no_grad(), gated_heads(model, {name: gate}):
            return mha(x, x, x)
    bias = mha.out_proj.bias.detach()
    parts = torch.stack([output(one) - bias for one in torch.eye(4)])
    gate = torch.tensor([0.3, -1.0, 0.0, 2.0])
    assert_close(output(gate), bias + (gate[:, None, None, None] * parts).sum(0))
    for_each = torch.rand(2, 1, 4)
    assert_close(output(for_each), torch.stack([output(g[0])[i] for i, g in enumerate(for_each)]))
    with pytest.raises(ValueError, match='has 4 heads, but 3 gates'):
        output(torch.ones(3))


def test_importance_is_the_mean_absolute_slope_over_sentences(batch):
    model = new_model().double()
    head = Head('decoder.layers.0.cross_attention', 2)
    sentences = [Batch(src[None, src != PAD], tgt[None, tgt != PAD]) for src, tgt in zip(batch.src, batch.tgt)]
    def loss(sentence, gate):
        gates = torch.ones(4, dtype=torch.float64)
        gates[2] = gate
        with torch.no_grad(), gated_heads(model, {head.attention: gates}):
            return batch_loss(model, sentence).item() * sentence.n_tokens
    slopes = [abs(loss(s, 1 + 1e-5) - loss(s, 1 - 1e-5)) / 2e-5 for s in sentences]
    n_tokens = sum(s.n_tokens for s in sentences)
    assert gradient_importance(model, [batch])[head] == pytest.approx(sum(slopes) / n_tokens, rel=1e-4)
    assert gradient_importance(model, sentences)[head] == pytest.approx(sum(slopes) / n_tokens, rel=1e-4)


def test_importance_of_a_pruned_model(batch):
    model = new_model()
    heads = [head for head in heads_of(model) if head.number in (0, 2)]
    importance = gradient_importance(prune_heads(model, heads), [batch])
    assert {head.number for head in importance} == {1, 3} and len(importance) == 12
    deaf = prune_heads(model, heads_of(model, 'cross'))
    worth = gradient_importance(deaf, [batch])
    assert all((value == 0) == (head.kind == 'encoder') for head, value in worth.items())


def test_leaving_one_out_by_every_method(batch):
    model = new_model(n_layers=1)
    outputs = head_outputs(model, [batch])
    found = {}
    for method in ('zero', 'mean', 'resample'):
        found[method] = leave_one_out(model, lambda m: validate(m, [batch]), method, outputs)
        assert list(found[method]) == heads_of(model)
    head = heads_of(model)[5]
    expected = validate(prune_heads(model, [head]), [batch]) - validate(model, [batch])
    assert found['zero'][head] == pytest.approx(expected, abs=1e-5)
    assert found['zero'] != found['mean'] != found['resample']
    for seed in (0, 1): # other seeds draw other outputs
        again = leave_one_out(model, lambda m: validate(m, [batch]), 'resample', outputs, seed)
        assert (again == found['resample']) == (seed == 0)


def test_ranks_and_normalization():
    x = dict(zip('abcd', (1.0, 20.0, 300.0, 4000.0)))
    assert rank_correlation(x, {key: -value for key, value in x.items()}) == pytest.approx(-1)
    assert rank_correlation(x, dict(zip('abcd', (10, 30, 20, 40)))) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert rank_correlation(x, dict(zip('abcd', (1, 2, 2, 3)))) == pytest.approx(0.9486833)
    with pytest.raises(ValueError, match='same things'):
        rank_correlation(x, {'a': 1})
    values = {head: head.number + 1.0 for head in heads_of(new_model())}
    even = normalized(values)
    assert even[Head('encoder.layers.0.self_attention', 1)] == pytest.approx(2 / 30 ** 0.5)


def test_a_curve_removes_heads_in_order():
    model = new_model()
    order = heads_of(model, 'cross')
    left = []
    def measure(smaller):
        left.append(heads_of(smaller, 'cross'))
        return float(len(left))
    assert pruning_curve(model, order, measure, [0, 3, 8]) == {8: 1.0, 5: 2.0, 0: 3.0}
    assert left == [order, order[3:], []]


def test_hard_concrete_gates_follow_their_formulas():
    torch.manual_seed(0)
    gates = HardConcrete(4)
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-3.0, -1.0, 1.0, 3.0]))
    draws = gates.draw(20_000)
    assert 0 <= draws.min() and draws.max() <= 1
    assert_close((draws > 0).float().mean(0), gates.open_probability().detach(), atol=0.015, rtol=0)
    final = gates.final()
    assert final[0] == 0 and final[3] == 1 and (final.diff() > 0).all()
    draws.mean(0).sum().backward()
    assert (gates.log_alpha.grad > 0).all()


def test_closed_gates_prune_and_the_others_move_into_the_weights(batch):
    model = new_model()
    heads = heads_of(model, 'cross')
    values = torch.tensor([0.0, 0.5, 1.0, 0.2, 0.0, 0.0, 1.0, 0.9])
    closed = close_gates(model, heads, values)
    gates = {name: values[4 * i:4 * i + 4] for i, name in enumerate(attention_names(SMALL)[4:])}
    with gated_heads(model, gates):
        assert_close(logits(closed, batch), logits(model, batch))
    assert len(heads_of(closed, 'cross')) == 5


def test_a_higher_penalty_leaves_fewer_heads(batch):
    model = new_model()
    def tuned(penalty, **options):
        return tune_gates(model, [batch] * 12, heads_of(model), penalty, gate_lr=0.5, **options)
    free = tuned(0.0)
    expensive = tuned(5.0)
    assert len(heads_of(free)) > 18 and len(heads_of(expensive)) < 6 and not free.training
    again = tuned(5.0)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), expensive.parameters(), strict=True))
    cross = tune_gates(model, [batch] * 12, heads_of(model, 'cross'), 5.0, gate_lr=0.5)
    assert len(heads_of(cross, 'encoder', 'decoder')) == 16 and len(heads_of(cross, 'cross')) < 4


def test_a_pruned_model_can_be_trained(batch):
    pruned = prune_heads(new_model(dropout=0.1), some_heads(new_model()))
    optimizer = make_optimizer(pruned)
    losses = [train_step(pruned, batch, optimizer, 5e-3) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5


def test_a_translator_works_with_a_pruned_model(tmp_path):
    whole = Translator.load(device='cpu')
    heads = [head for head in heads_of(whole.model) if head.number == 0] + heads_of(whole.model, 'encoder')[:4]
    small = Translator(prune_heads(whole.model, heads), whole.tokenizer)
    small.save(tmp_path)
    again = Translator.load(tmp_path, device='cpu')
    texts = ['The dog sleeps.', 'The small cat sees the bird in the garden.']
    with without_heads(whole.model, heads):
        expected = whole.translate(texts)
        scores = whole.score(texts, expected)
    assert again.translate(texts) == small.translate(texts) == expected
    assert again.score(texts, expected) == pytest.approx(scores, abs=1e-3)
    maps = again.attention('The dog sleeps.')
    assert maps.encoder[0].abs().max() == 0 and maps.cross[1, 1].sum() > 0
    assert isinstance(again.model.encoder.layers[0].self_attention, PrunedAttention)
