"""Models that lost heads: every position, norm and width; files, searches, exports. Page 31 shows the rest."""
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from annotated_transformer.v1 import decoding
from annotated_transformer.v1.batches import Batch
from annotated_transformer.v1.checkpoints import average_checkpoints, load_model, save_model
from annotated_transformer.v1.checks import check_transformer
from annotated_transformer.v1.decoding import State, beam_search, decoding_state, greedy
from annotated_transformer.v1.heads import (
    KINDS, Head, HeadGates, close_gates, gated_heads, gradient_importance, heads_of, leave_one_out,
    prune_heads, shut, tune_gates)
from annotated_transformer.v1.interop import export_ctranslate2, export_marian, to_torch_transformer
from annotated_transformer.v1.layers import NoHeads, keep_heads
from annotated_transformer.v1.toy_languages import toy_ende
from annotated_transformer.v1.training import TrainConfig, Objective, batch_loss, train_step, validate
from annotated_transformer.v1.transformer import Transformer, TransformerConfig, count_parameters
from annotated_transformer.v1.translator import Translator
from annotated_transformer.v1.vocabulary import BOS, EOS, PAD

SMALL = TransformerConfig(vocab_size=29, n_layers=2, d_model=16, d_ff=20, n_heads=4, dropout=0.0, max_len=24)
KINDS_OF_MODEL = [
    dict(), dict(norm='pre'), dict(positions='learned'), dict(positions='alibi'), dict(positions='rotary'),
    dict(d_k=6, d_v=3), dict(positions='alibi', n_heads=3, d_k=4, d_v=5),
    dict(tied=False, activation='swish', output_bias=True)]


def model_of(seed=0, **settings):
    torch.manual_seed(seed)
    model = Transformer(replace(SMALL, **settings)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1: p.normal_(0, 0.3)     # biases and norms too: a zero hides a mistake
    return model


def ids(seed=0):
    torch.manual_seed(seed)
    src, tgt = torch.randint(4, 29, (3, 7)), torch.randint(4, 29, (3, 6))
    src[:, -1], tgt[:, 0] = EOS, BOS
    src[1, 4:], src[1, 3], tgt[1, 3:] = PAD, EOS, PAD
    return src, tgt


def some(model, seed=0):
    "A third of all heads, and all heads of one attention of each kind."
    torch.manual_seed(seed)
    heads = heads_of(model)
    whole = ({heads_of(model, kind)[0].attention for kind in ('encoder', 'cross')}
             | {heads_of(model, 'decoder')[-1].attention})
    drawn = {heads[i] for i in torch.randperm(len(heads))[:len(heads)//3].tolist()}
    return sorted(drawn | {head for head in heads if head.attention in whole})


@pytest.mark.parametrize('settings', KINDS_OF_MODEL, ids=str)
def test_taken_out_is_silenced(settings):
    model, (src, tgt) = model_of(**settings), ids()
    heads = some(model)
    small = prune_heads(model, heads)
    with gated_heads(model, shut(model, heads)): assert_close(small(src, tgt), model(src, tgt))
    assert count_parameters(small) < count_parameters(model)
    built = Transformer(small.config).eval()
    assert ({name: p.shape for name, p in built.named_parameters()}
            == {name: p.shape for name, p in small.named_parameters()})
    built.load_state_dict(small.state_dict())
    assert_close(built(src, tgt), small(src, tgt))
    assert not (small(src, tgt) - model(src, tgt)).abs().max() < 1e-3


@pytest.mark.parametrize('settings', KINDS_OF_MODEL, ids=str)
def test_searches_find_what_the_silenced_model_finds(settings):
    model, (src, _) = model_of(**settings), ids()
    for heads in (some(model), [h for h in heads_of(model) if h.number != 1],
                  heads_of(model, 'decoder'), heads_of(model)):
        small = prune_heads(model, heads)
        def found(model):
            ways = beam_search(model, src, max_extra=5, n_best=2)
            return ([[(h.ids, round(h.log_prob, 3)) for h in each] for each in ways],
                    [h.ids for h in greedy(model, src, max_extra=5)])
        with gated_heads(model, shut(model, heads)): assert found(small) == found(model)


@pytest.mark.parametrize('settings', KINDS_OF_MODEL[:5], ids=str)
def test_caches_give_what_a_whole_pass_gives(settings):
    model, (src, tgt) = model_of(**settings), ids()
    small = prune_heads(model, [h for h in heads_of(model) if h.layer == 0 and h.kind == 'decoder' or h.number == 2])
    assert type(small.decoder.layers[0].self_attention) is NoHeads
    expected = small(src, tgt)
    for state in (State(small, src), decoding_state(small, src)):
        for t in range(4):
            logits = state.logits(tgt[:, t:t+1])[:, 0]
            assert_close(logits[[0, 2]], expected[[0, 2], t], atol=1e-4, rtol=1e-4)
            if t < 3: assert_close(logits[1], expected[1, t], atol=1e-4, rtol=1e-4)
            state.follow(torch.zeros(3, 1, dtype=torch.long))
    state = State(small, src)
    state.logits(tgt[:, :1])
    state.follow(torch.zeros(3, 2, dtype=torch.long)), state.keep(torch.tensor([2, 0]))
    assert_close(state.logits(tgt[[2, 0], 1:2].expand(2, 2)),
                 expected[[2, 0], 1][:, None].expand(2, 2, -1), atol=1e-4, rtol=1e-4)


def test_without_any_head_only_biases_are_left():
    model, (src, tgt) = model_of(), ids()
    bare = prune_heads(model, heads_of(model))
    assert heads_of(bare) == [] and all(type(bare.get_submodule(name)) is NoHeads for name in SMALL.attentions)
    assert {name.rsplit('.', 1)[1] for name, _ in bare.named_parameters() if '_attention' in name} == {'bias'}
    other = torch.roll(src, 1, 0)
    assert_close(bare(other, tgt), bare(src, tgt))         # nobody reads the source
    bare(src, tgt).sum().backward()
    assert all(p.grad is not None for name, p in bare.named_parameters() if 'decoder' in name)
    assert gradient_importance(bare, [Batch(src, tgt)]) == {} == leave_one_out(bare, lambda m: 1.)
    assert prune_heads(bare, []).config == bare.config


def test_heads_that_nobody_reads_are_worth_nothing():
    "Without cross-attention the encoder's heads have no way into the loss."
    model, (src, tgt) = model_of(), ids()
    deaf = prune_heads(model, heads_of(model, 'cross'))
    worth = gradient_importance(deaf, [Batch(src, tgt)])
    assert {head.kind for head in worth} == {'encoder', 'decoder'}
    assert all((x == 0) == (head.kind == 'encoder') for head, x in worth.items())

def test_a_smaller_model_is_a_right_one():
    config = replace(SMALL, d_model=32, d_ff=48, max_len=32, dropout=0.1, n_layers=1)
    kept = dict(zip(config.attentions, ([], [1, 3], [2])))
    torch.manual_seed(0)
    check_transformer(Transformer(replace(config, kept_heads=kept))).raise_if_failed()


def test_a_smaller_model_can_be_trained_on():
    model, (src, tgt) = model_of(dropout=0.1), ids()
    small, batch = prune_heads(model, some(model)).train(), Batch(src, tgt)
    optimizer = torch.optim.Adam(small.parameters())
    losses = [train_step(Objective(small, TrainConfig()), [batch], optimizer, 5e-3) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5


def test_settings_name_what_is_wrong():
    name = SMALL.attentions[0]
    for kept, words in (
            ({'encoder.layers.7.self_attention': [0]},
             'there is no encoder.layers.7.self_attention, but encoder.layers.0'),
            ({name: [4]}, r'are \[4\]: choose different ones from 0 to 3'),
            ({name: [0, 0]}, r'\[0, 0\]'), ({name: [-1]}, r'\[-1\]')):
        with pytest.raises(ValueError, match=words): replace(SMALL, kept_heads=kept)
    with pytest.raises(ValueError, match='from 0 to 1'): replace(SMALL, n_heads=2, kept_heads={name: [3]})
    config = replace(SMALL, kept_heads={name: [2, 0], SMALL.attentions[5]: []})
    assert config.kept_heads == {name: [0, 2], SMALL.attentions[5]: []}
    assert TransformerConfig(**json.loads(json.dumps(asdict(config)))) == config
    old = {k: v for k, v in asdict(SMALL).items() if k != 'kept_heads'}       # as written before there was such a thing
    assert TransformerConfig(**old) == SMALL and SMALL.kept_heads is None
    assert len({config, replace(config), SMALL}) == 2


def test_files(tmp_path):
    model, (src, tgt) = model_of(), ids()
    small = prune_heads(model, some(model))
    save_model(small, tmp_path/'small')
    again = load_model(tmp_path/'small')
    assert again.config == small.config and torch.equal(again(src, tgt), small(src, tgt))
    assert (tmp_path/'small/model.safetensors').stat().st_size < 4*count_parameters(model)
    save_model(model, tmp_path/'whole')
    settings = json.loads((tmp_path/'small/config.json').read_text())
    (tmp_path/'whole/config.json').write_text(json.dumps(settings))
    with pytest.raises(ValueError, match='does not fit its config.json'): load_model(tmp_path/'whole')
    for wrong in ([0], {'encoder': [0]}, {SMALL.attentions[0]: 2}, {SMALL.attentions[0]: ['a']}):
        (tmp_path/'small/config.json').write_text(json.dumps(settings | dict(kept_heads=wrong)))
        with pytest.raises(ValueError, match='config.json is no configuration'): load_model(tmp_path/'small')
    for i in range(2): save_model(prune_heads(model_of(seed=i), some(model)), tmp_path/f'step-{i}')
    average_checkpoints([tmp_path/'step-0', tmp_path/'step-1'], tmp_path/'mean')
    assert load_model(tmp_path/'mean').config == small.config
    save_model(prune_heads(model, some(model)[1:]), tmp_path/'other')
    with pytest.raises(ValueError, match='config.json differ'):
        average_checkpoints([tmp_path/'step-0', tmp_path/'other'], tmp_path/'mean2')


@pytest.fixture(scope='module')
def toy():
    return Translator.load(Path(decoding.__file__).parent/'data/toy-ende')


def test_translators(toy, tmp_path):
    texts = [pair.src for pair in toy_ende('test', n=12)]
    heads = [h for h in heads_of(toy.model) if h.number == 0] + heads_of(toy.model, 'encoder')[:4]
    small = Translator(prune_heads(toy.model, heads), toy.tokenizer, dict(made='by taking out heads'))
    small.save(tmp_path/'small')
    again = Translator.load(tmp_path/'small')
    with gated_heads(toy.model, shut(toy.model, heads)):
        expected, scores = toy.translate(texts), toy.score(texts, texts)
    assert again.translate(texts) == expected == small.translate(texts) and again.training == small.training
    assert again.score(texts, texts) == pytest.approx(scores, abs=1e-3)
    assert len(again.sample(texts[:3], seed=1)) == 3


def test_exports_say_that_they_cannot(toy, tmp_path):
    small = Translator(prune_heads(toy.model, heads_of(toy.model)[:1]), toy.tokenizer)
    small.save(tmp_path/'small')
    with pytest.raises(ValueError, match='kept_heads.*torch.nn.Transformer every attention has all of its 4'):
        to_torch_transformer(small.model)
    for library, export in (('transformers', export_marian), ('ctranslate2', export_ctranslate2)):
        try: __import__(library)
        except ImportError: continue
        with pytest.raises(ValueError, match='kept_heads'): export(tmp_path/'small', tmp_path/library)
        assert not (tmp_path/library).exists()


def test_maps_of_a_smaller_model_keep_their_places(toy):
    "A head that was taken out looks nowhere; the others stand where they stood."
    gone = [h for h in heads_of(toy.model) if h.number == 1] + heads_of(toy.model, 'cross')[4:]
    small = Translator(prune_heads(toy.model, gone), toy.tokenizer)
    maps = small.attention('The dog sleeps.', 'Der Hund schläft.')
    for kind in KINDS:
        found = getattr(maps, kind)
        assert found.shape[:2] == (2, 4)
        for head in heads_of(toy.model, kind):
            sums = found[head.layer, head.number].sum(-1)
            assert_close(sums, torch.zeros_like(sums) if head in gone else torch.ones_like(sums))


def test_nothing_is_left_behind():
    model, (src, tgt) = model_of(), ids()
    before = {name: p.clone() for name, p in model.named_parameters()}
    expected, config = model(src, tgt), model.config
    batch = Batch(src, tgt)
    (gradient_importance(model, [batch]), leave_one_out(model, lambda m: validate(m, [batch])),
     prune_heads(model, some(model)))
    tune_gates(model, [batch]*2, heads_of(model), 0.1), close_gates(model, HeadGates(model, heads_of(model)))
    assert torch.equal(model(src, tgt), expected) and model.config == config and not model.training
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_copy_shares_nothing():
    model = model_of(positions='alibi')
    small = prune_heads(model, some(model))
    own = {p.data_ptr() for p in small.parameters() if p.numel()}
    assert not own & {p.data_ptr() for p in model.parameters()}
    assert small.src_embed.weight is small.output.weight
    few = keep_heads(model.encoder.layers[0].self_attention, [2])
    assert torch.equal(few.positions.slopes, model.encoder.layers[0].self_attention.positions.slopes[:, 2:3])
    assert model.encoder.layers[0].self_attention.positions.slopes.size(1) == 4


def test_gates_of_a_model_that_lost_heads_before():
    model, (src, tgt) = model_of(), ids()
    small = prune_heads(model, [h for h in heads_of(model) if h.number == 0])
    importance = gradient_importance(small, [Batch(src, tgt)])
    assert set(importance) == set(heads_of(small)) and {h.number for h in importance} == {1, 2, 3}
    target = heads_of(small, 'cross')[1]
    gates = {target.attention: torch.ones(3, requires_grad=True)}
    with gated_heads(small, gates):
        slope, = torch.autograd.grad(batch_loss(small, Batch(src[:1], tgt[:1])), gates[target.attention])
    one = gradient_importance(small, [Batch(src[:1], tgt[:1])])
    assert abs(slope[1].item()) == pytest.approx(one[target] * Batch(src[:1], tgt[:1]).n_tokens, rel=1e-4)
    with pytest.raises(ValueError, match='no Head.*number=0'): shut(small, [Head(target.attention, 0)])


def test_price_and_seed():
    model, (src, tgt) = model_of(), ids()
    def learn(price, steps=4, **options):
        return tune_gates(model, [Batch(src, tgt)]*steps, heads_of(model), price, **options)
    free, dear = learn(0., gate_rate=0.5), learn(5., 15, gate_rate=0.5)
    assert len(heads_of(free)) == 24 and len(heads_of(dear)) < 6
    again, other = learn(0.05), learn(0.05, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), learn(0.05).parameters(), strict=True))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(again.parameters(), other.parameters()))
    cross = tune_gates(model, [Batch(src, tgt)]*15, heads_of(model, 'cross'), 5., gate_rate=0.5)
    assert len(heads_of(cross, 'encoder', 'decoder')) == 16 and len(heads_of(cross, 'cross')) < 4
