"""Checks of anybody's Transformer: right models of many kinds pass all, wrong ones fail where they should,
nothing handed in is changed."""
import copy
import math
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from annotated_transformer.v1.attention import attention
from annotated_transformer.v1.batches import collate
from annotated_transformer.v1.checks import (
    QUESTIONS, Adapter, Skip, ask, check_accumulation, check_attention, check_averaging, check_batch, check_decoder,
    check_label_smoothing, check_positions, check_schedule, check_transformer, check_vocabulary, position_modules)
from annotated_transformer.v1.decoding import greedy
from annotated_transformer.v1.losses import label_smoothing_loss
from annotated_transformer.v1.optimizer import learning_rate, paper_peak
from annotated_transformer.v1.positions import LearnedPositions, SinusoidalPositions, sinusoids
from annotated_transformer.v1.transformer import Transformer, TransformerConfig
from annotated_transformer.v1.vocabulary import EOS, PAD

CONFIG = TransformerConfig(vocab_size=19, n_layers=1, d_model=32, d_ff=48, n_heads=4, max_len=16)
OURS = {
    'post': CONFIG, 'pre, deep': replace(CONFIG, norm='pre', n_layers=3),
    'learned': replace(CONFIG, positions='learned', n_layers=2),
    'alibi': replace(CONFIG, positions='alibi'), 'rotary': replace(CONFIG, positions='rotary', n_layers=2),
    'untied, odd heads': replace(CONFIG, tied=False, d_k=6, d_v=5),
    'scaled, large vocabulary': replace(CONFIG, init='scaled', vocab_size=3000)}


class Sinusoids(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.register_buffer('table', sinusoids(20, d_model), persistent=False)

    def forward(self, x): return x + self.table[:x.size(1)]

def call(m, src, tgt, future=True, padding=True, turned=False):
    "`nn.Transformer` between its embeddings and its output layer."
    x, y = (m['positions'](m['embed'](ids) * math.sqrt(24)) for ids in (src, tgt))
    mask = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool).triu(1) if future else None
    hide = src == 0 if padding else None
    if turned: x, y = x.transpose(0, 1), y.transpose(0, 1)
    out = m['core'](x, y, tgt_mask=mask, tgt_is_causal=future, src_key_padding_mask=hide, memory_key_padding_mask=hide)
    return m['out'](out.transpose(0, 1) if turned else out)

def torch_transformer(batch_first=True, norm_first=False, **kwargs):
    torch.manual_seed(0)
    core = nn.Transformer(24, 4, 2, 2, 40, batch_first=batch_first, norm_first=norm_first)
    embed = nn.Embedding(17, 24)
    nn.init.normal_(embed.weight, std=24**-0.5)
    parts = nn.ModuleDict(dict(embed=embed, positions=Sinusoids(24), core=core, out=nn.Linear(24, 17)))
    return Adapter(parts, lambda m, src, tgt: call(m, src, tgt, **kwargs))

def ours(config):
    torch.manual_seed(0)
    return Transformer(config)


@pytest.mark.parametrize('name', list(OURS))
def test_our_models_pass_everything(name):
    config = OURS[name]
    kind = 'relative' if config.positions in ('alibi', 'rotary') else 'absolute'
    report = check_transformer(ours(config), positions=kind, make=lambda: Transformer(config))
    report.raise_if_failed(skipped=True)

@pytest.mark.parametrize('norm_first, batch_first', [(False, True), (True, False)])
def test_torchs_transformer_passes_everything(norm_first, batch_first):
    check_transformer(torch_transformer(batch_first, norm_first, turned=not batch_first)).raise_if_failed(skipped=True)

def test_marian_passes_everything():
    marian = pytest.importorskip('transformers', reason='the development requirements are not installed')
    config = marian.MarianConfig(
        vocab_size=23, d_model=32, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=16, pad_token_id=22, decoder_start_token_id=22, eos_token_id=0)
    torch.manual_seed(0)
    model = Adapter(marian.MarianMTModel(config), lambda m, src, tgt: m(
        input_ids=src, attention_mask=src.ne(22).long(), decoder_input_ids=tgt, use_cache=False).logits)
    assert check_transformer(model, pad=22).raise_if_failed().skipped == ['device']   # it looks into its masks
    model.call = lambda m, src, tgt: m(input_ids=src, decoder_input_ids=tgt, use_cache=False).logits
    quick = [name for name in QUESTIONS if name != 'by heart']
    # faint, at Marian's small initial weights
    assert check_transformer(model, pad=22, only=quick).failed == ['source padding']

def test_log_probabilities_are_as_good_as_logits():
    model = Adapter(ours(CONFIG), lambda m, src, tgt: m(src, tgt).log_softmax(-1))
    check_transformer(model).raise_if_failed(skipped=True)

def test_a_model_made_for_32_bits_only():
    model = Adapter(ours(CONFIG), lambda m, src, tgt: m(src, tgt) @ torch.eye(19, device=src.device))
    report = check_transformer(model)
    assert 'float32' in report['runs'].tried
    report.raise_if_failed(skipped=True)

def test_models_without_positions_dropout_padding_or_youth():
    torch.manual_seed(0)
    model = ours(replace(CONFIG, dropout=0.0, positions='rotary'))
    for layer in (*model.encoder.layers, *model.decoder.layers): layer.self_attention.positions = None
    report = check_transformer(model, positions='none', dropout=False, trained=True, pad=None).raise_if_failed()
    assert set(report.skipped) == {'source order', 'target order', 'training', 'first loss',
                                   'source padding', 'target padding'}
    report = check_transformer(model, dropout=False)
    assert {'source order', 'target order'} <= set(report.failed) and not report.passed

def test_what_is_tried_can_be_chosen():
    "Other lengths, fewer words than logits, a source vocabulary and padding of one's own, a stricter tolerance."
    config = replace(CONFIG, dropout=0.)
    model = Adapter(ours(config), lambda m, src, tgt: m(src.clamp(max=12), tgt))
    chosen = dict(dropout=False, src_vocab_size=12, vocab_size=15, lengths=(4, 7), tol=1e-7,
                  append_padding=lambda ids, k: torch.cat([ids, ids.new_zeros(len(ids), k)], 1))
    report = check_transformer(model, **chosen).raise_if_failed()
    assert 'src (2, 4), tgt (2, 7)' in report['runs'].tried
    assert 'source' in check_transformer(model, dropout=False, only=['source']).failed # beyond 12 all words are one
    wrong = chosen | dict(append_padding=lambda ids, k: torch.cat([ids, ids.new_full((len(ids), k), 5)], 1))
    assert 'source padding' in check_transformer(model, **wrong).failed
    for lengths in (6, 2), (2, 5):
        with pytest.raises(ValueError, match='3 tokens at least'): check_transformer(model, lengths=lengths)

def test_what_cannot_be_tried_says_what_to_hand_in():
    class Nameless(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = torch_transformer().model
        def forward(self, src, tgt):
            x, y = (self.m['embed'](ids)*24**0.5 + sinusoids(ids.size(1), 24) for ids in (src, tgt))
            mask, hide = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool).triu(1), src == 0
            return self.m['out'](self.m['core'](x, y, tgt_mask=mask, tgt_is_causal=True,
                                                src_key_padding_mask=hide, memory_key_padding_mask=hide))
    model = Nameless()
    del model.m['positions']
    report = check_transformer(model, only=['without positions'])
    assert report['runs'].passed, report
    assert report.skipped == ['without positions'] and 'without_positions=' in report['without positions'].tried
    bare = lambda src, tgt: call({**model.m, 'positions': nn.Identity()}, src, tgt)
    assert (check_transformer(model.eval(), only=['without positions'], without_positions=bare).named(True)
            == ['runs', 'without positions'])


@pytest.mark.parametrize('kwargs, found', [
    (dict(future=False), 'future'), (dict(padding=False), 'source padding'),
    (dict(batch_first=False), 'runs')], ids=lambda x: str(x))
def test_bugs_of_torchs_transformer_are_found(kwargs, found):
    quick = [name for name in QUESTIONS if name != 'by heart']
    assert found in check_transformer(torch_transformer(**kwargs), only=quick).failed

def test_the_model_and_the_generator_are_left_as_they_were():
    model = ours(CONFIG).train()
    model.decoder.eval()
    before, modes, state = (copy.deepcopy(model.state_dict()), [m.training for m in model.modules()],
                            torch.get_rng_state())
    hooks = sum(len(m._forward_hooks) for m in model.modules())
    check_transformer(model, steps=3)
    assert all(torch.equal(before[k], x) for k, x in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert (all(q.grad is None for q in model.parameters())
            and sum(len(m._forward_hooks) for m in model.modules()) == hooks)

def test_errors_of_the_model_are_findings_and_unknown_names_are_not():
    report = check_transformer(Adapter(nn.Linear(2, 2), lambda m, src, tgt: m(src)))
    assert report.failed == ['runs'] and len(report.skipped) == len(QUESTIONS) - 1
    with pytest.raises(AssertionError, match='1 of .* do not hold'): report.raise_if_failed()
    with pytest.raises(ValueError, match="'absolute', 'relative' or 'none'"):
        check_transformer(ours(CONFIG), positions='learned')
    with pytest.raises(ValueError, match="no question is called .'futur'"):
        check_transformer(ours(CONFIG), only=['futur'])

def test_a_tuple_is_no_tensor_of_logits():
    report = check_transformer(Adapter(ours(CONFIG), lambda m, src, tgt: (m(src, tgt), None)))
    assert 'wrap the model' in report['runs'].tried

def test_tiny_in_less_than_twenty_seconds():
    torch.manual_seed(0)
    model, began = Transformer(TransformerConfig.preset('tiny')), time.process_time()
    check_transformer(model).raise_if_failed(skipped=True)
    assert time.process_time() - began < 20

def test_words_and_positions_in_one_module_are_not_switched_off():
    class TokenAndPositionEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(20, 24)
        def forward(self, ids): return self.words(ids)*24**0.5 + sinusoids(ids.size(1), 24)
    parts = torch_transformer().model
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = nn.ModuleDict(dict(embed=TokenAndPositionEmbedding(), core=parts['core'], out=parts['out']))
        def forward(self, src, tgt):
            mask = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool).triu(1)
            return self.m['out'](self.m['core'](self.m['embed'](src), self.m['embed'](tgt), tgt_mask=mask))
    report = check_transformer(Model(), only=['without positions'])
    assert report.skipped == ['without positions'] and 'holds the words too' in report['without positions'].tried

def test_a_softmax_in_32_bits_is_no_bug():
    model = ours(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        def in_float(self, dim, own=torch.Tensor.softmax): return own(self.float(), dim).to(self.dtype)
        patch.setattr(torch.Tensor, 'softmax', in_float)
        check_transformer(model, only=['without positions', 'source padding', 'future']).raise_if_failed()

def test_position_modules():
    names = dict(pos_embed=nn.Embedding(3, 2), pe=nn.Identity(), positionwise_ffn=nn.Linear(2, 2),
                 pos_ffn=nn.Linear(2, 2), span=nn.Identity(), compose=nn.Identity())
    assert list(position_modules(nn.ModuleDict(names))) == ['pos_embed', 'pe']
    assert list(position_modules(ours(CONFIG))) == ['src_positions', 'tgt_positions']


def sdpa(query, key, value, mask): return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

class OneHead(nn.MultiheadAttention):
    "torch's, with one head and nothing projected."
    def __init__(self):
        super().__init__(4, 1, bias=False, batch_first=True)
        with torch.no_grad():
            self.in_proj_weight.copy_(torch.eye(4).repeat(3, 1)), self.out_proj.weight.copy_(torch.eye(4))

    def forward(self, query, key, value, mask):
        self.to(query.dtype)
        return super().forward(query, key, value, attn_mask=mask if mask is None else mask.expand(2, 5, 7))

@pytest.mark.parametrize('attend, meaning, settings', [
    (attention, 'True: may look', dict(blind=True)), (sdpa, 'True: may look', {}),
    (lambda q, k, v, mask: sdpa(q, k, v, None if mask is None else ~mask), 'True: hidden', {}),
    (lambda q, k, v, mask: sdpa(q, k, v, None if mask is None else 0*q[..., :1] + mask), 'added to the scores', {}),
    (OneHead(), 'True: hidden', dict(heads=False, d_v=4))], ids=['ours', 'torch', 'hiding', 'additive', 'one head'])
def test_attention_by_every_convention(attend, meaning, settings):
    report = check_attention(attend, **settings).raise_if_failed()
    assert report['mask'].tried.startswith(meaning)

def wrong_axis(q, k, v, mask):
    return attention(q * (q.size(-1)/q.size(1))**0.5, k, v, mask)
def in_place(q, k, v, mask):
    return attention(q.mul_(1), k.zero_(), v, mask)
def very_negative(q, k, v, mask):
    s = q @ k.mT / q.size(-1)**0.5
    return (s if mask is None else s.masked_fill(~mask, -1e9)).softmax(-1) @ v
def unstable(q, k, v, mask):
    e = (q @ k.mT / q.size(-1)**0.5).exp()
    e = e if mask is None else e*mask
    return e/e.sum(-1, keepdim=True) @ v
def not_renormalised(q, k, v, mask):
    w = attention(q, k, v)[1]
    w = w if mask is None else w*mask
    return w @ v, w

@pytest.mark.parametrize('attend, failed', [
    (wrong_axis, ['equation', 'mask', 'large scores']), (in_place, ['runs']), (very_negative, ['16 bits']),
    (unstable, ['hidden', 'large scores']), (not_renormalised, ['mask'])],
    ids=lambda x: getattr(x, '__name__', None))
def test_attention_that_is_wrong(attend, failed):
    assert check_attention(attend).failed == failed

def test_positions():
    check_positions(SinusoidalPositions(16, 64), 16, sinusoidal=True).raise_if_failed(skipped=True)
    check_positions(
        lambda x: 4*x + torch.cat([sinusoids(50, 16)[:, ::2], sinusoids(50, 16)[:, 1::2]], 1)[:x.size(1)], 16,
        sinusoidal=True, kept=False).raise_if_failed()
    check_positions(LearnedPositions(16, 64), 16).raise_if_failed()
    table = sinusoids(50, 16)
    assert check_positions(lambda x: x, 16).failed == ['distinct']
    assert check_positions(lambda x: x + sinusoids(x.size(1), 16), 16).failed == ['kept']
    assert check_positions(lambda x: x + table[:x.size(0), None], 16).failed == ['alike', 'distinct']
    assert check_positions(lambda x: x + table[:x.size(1)]/x.size(1), 16).failed == ['prefix']
    assert check_positions(lambda x: x.relu() + table[:x.size(1)], 16).failed == ['adds']
    assert check_positions(LearnedPositions(16, 64), 16, sinusoidal=True).failed == ['formula']
    assert check_positions(LearnedPositions(16, 20), 16).failed == ['runs']

def harvard(log_p, targets, smoothing=0.1, pad=0):
    "A smoothed target held for every word, as in a well known tutorial."
    q = torch.full_like(log_p, smoothing/(log_p.size(1) - 2)).scatter(1, targets[:, None], 1 - smoothing)
    q[:, pad] = 0
    return F.kl_div(log_p, q.masked_fill((targets == pad)[:, None], 0), reduction='sum')

def test_label_smoothing_by_every_convention():
    for loss in (lambda z, y: label_smoothing_loss(z, y, ignore_index=0),
                 lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1, ignore_index=0),
                 lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1, ignore_index=0, reduction='sum'),
                 lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1, ignore_index=0, reduction='none')):
        check_label_smoothing(loss, pad=0).raise_if_failed(skipped=True)
    report = check_label_smoothing(harvard, pad=0)
    assert report.failed == ['dense'] and 'divergence' in report['value'].tried
    check_label_smoothing(harvard, pad=0, dense=True).raise_if_failed()

def test_label_smoothing_that_is_wrong():
    ce = lambda z, y, **kw: F.cross_entropy(z, y, ignore_index=0, **kw)
    assert 'value' in check_label_smoothing(ce, pad=0).failed
    assert check_label_smoothing(
        lambda z, y: ce(z, y, label_smoothing=0.1, reduction='sum')/len(y), pad=0).failed == ['padding']
    assert check_label_smoothing(
        lambda z, y: -F.one_hot(y, z.size(1)).mul(0.9).add(0.1/z.size(1))
                      .mul(z.softmax(-1).log()).sum(-1).mean()).failed
    assert check_label_smoothing(lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), 0.2).failed == ['value']

def test_schedules():
    rate = lambda s: learning_rate(s, paper_peak(512, 100), 100)
    check_schedule(rate, 100, peak=paper_peak(512, 100)).raise_if_failed(skipped=True)
    check_schedule([rate(s + 1) for s in range(1000)], 100).raise_if_failed()
    check_schedule([rate(s) for s in range(1000)], 100).raise_if_failed()                  # counted from 0
    check_schedule(lambda s: 1e-3*min(s/100, (500 - s)/400), 100, falls=False).raise_if_failed()
    # a step for each of ten small batches
    assert 'peak' in check_schedule([rate(10*s) for s in range(1, 400)], 100).failed
    assert check_schedule(lambda s: min(1/s**-1, 100), 100).failed == ['fall']
    assert check_schedule(rate, 100, peak=1e-3).failed == ['height']
    assert check_schedule(lambda s: rate(s - 1) if s > 1 else 1/0, 100).failed == ['runs']
    assert check_schedule([rate(1)]*50, 100).failed == ['runs']


@pytest.fixture(scope='module')
def decoding():
    torch.manual_seed(2)
    model = Transformer(replace(CONFIG, tied=False, max_len=12)).eval()
    src = collate([(torch.randint(4, 19, (n,)).tolist(), []) for n in (3, 7, 5, 1, 6)]).src
    return model, src

def test_special_ids_of_ones_own(decoding):
    model, src = decoding
    said, order = greedy(model, src)[0].ids[0], torch.arange(19)
    order[[PAD, said]] = order[[said, PAD]]                                      # padding and a word change places
    report = check_decoder(lambda src: [order[torch.tensor(h.ids)].tolist() for h in greedy(model, order[src])],
                           lambda src, tgt: model(order[src], order[tgt])[..., order], order[src], pad=said)
    assert not report.failed, report

def test_decoding(decoding):
    model, src = decoding
    right = lambda src: [(h.ids, h.log_prob) for h in greedy(model, src)]
    check_decoder(right, model, src).raise_if_failed(skipped=True)
    assert check_decoder(lambda src: [h.ids for h in greedy(model, src)], model, src).skipped == ['score']
    later = check_decoder(lambda src: [ids + [EOS, 5] for ids, _ in right(src)], model, src)
    assert later.failed == ['ends']
    assert 'score' in check_decoder(lambda src: [(ids, p + 1) for ids, p in right(src)], model, src).failed
    assert 'likeliest' in check_decoder(lambda src: [ids[::-1] + [4] for ids, _ in right(src)], model, src).failed
    assert 'order' in check_decoder(lambda src: [right(src)[0]]*len(src), model, src, greedy=False).failed
    assert 'alone' in check_decoder(lambda src: [ids[:src.size(1) - 5] for ids, _ in right(src)], model, src).failed
    assert check_decoder(lambda src: right(src)[1:], model, src).failed == ['runs']
    assert check_decoder(lambda src: [[]]*len(src), model, src).failed == ['runs']
    early = check_decoder(lambda src: [[*ids[:2], EOS] for ids, _ in right(src)], model, src)
    assert early.failed == ['likeliest'] # it says that it has ended, and the model does not


def test_batches():
    pairs = [([5, 6], [7, 8, 9]), ([5], [4])]
    batch = collate(pairs)
    check_batch(batch.src, batch.tgt_in, batch.tgt_out).raise_if_failed()
    without_eos = batch.tgt_in.masked_fill(batch.tgt_in == EOS, PAD)
    check_batch(batch.src, without_eos, batch.tgt_out).raise_if_failed()
    assert 'shifted' in check_batch(batch.src, batch.tgt_out, batch.tgt_out).failed
    assert check_batch(F.pad(batch.src, (0, 3)), batch.tgt_in, batch.tgt_out).failed == ['narrow']
    assert 'ends' in check_batch(batch.src, batch.tgt_in, batch.tgt_out.masked_fill(batch.tgt_out == EOS, PAD)).failed

def test_vocabulary_average_accumulation():
    assert check_vocabulary(['a', 'b'], [['a'], ['b', 'c']]).passed
    assert check_vocabulary(['a', 'd', 'a'], [['a'], ['b', 'c']]).failed == ['training', 'once']
    mean = lambda states: {k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}
    check_averaging(mean).raise_if_failed()
    def in_place(states):
        for k, x in states[0].items():
            for other in states[1:]: x.add_(other[k])
            x.div_(len(states))
        return states[0]
    assert check_averaging(in_place).failed == ['untouched']
    assert check_averaging(lambda states: sum(states)).failed[:1] == ['mean']
    x, y = torch.randn(10, 3), torch.randn(10)
    def backward(model, batches, scaled=True):
        total = sum(len(x) for x, _ in batches)
        for x, y in batches:
            loss = (model(x)[:, 0] - y).square()
            (loss.sum()/total if scaled else loss.mean()).backward()
    model, parts = nn.Linear(3, 1), [(x[:2], y[:2]), (x[2:], y[2:])]
    check_accumulation(backward, model, (x, y), parts).raise_if_failed()
    assert not check_accumulation(lambda m, b: backward(m, b, False), model, (x, y), parts)

def test_questions_of_ones_own():
    def impossible(): raise Skip('hand in more')
    report = ask('mine', {'a': ('holds', lambda: (True, 'tried')), 'b': ('cannot be tried', impossible),
                          'c': ('breaks', lambda: [][0])})
    assert (report.named(True), report.skipped, report.failed) == (['a'], ['b'], ['c'])
    assert 'IndexError' in report['c'].tried and 'hand in more' in repr(report)

def test_weights_that_are_all_alike_average_as_well():
    def mean(states): return {k: sum(s[k] for s in states)/len(states) for k in states[0]}
    states = [{'norm.weight': torch.full((4,), x), 'scale': torch.tensor([x])} for x in (0.1, 0.3, 0.7)]
    check_averaging(mean, states).raise_if_failed()
    assert check_averaging(lambda states: states[-1], states).failed == ['mean']


def test_padding_may_have_an_id_that_is_no_word():
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=-100, reduction='sum')
    check_label_smoothing(loss, 0.1, pad=-100).raise_if_failed()
