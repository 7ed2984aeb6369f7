"The fast functions return what the reference functions return, gradients included."
import inspect
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from annotated_transformer import kernels
from annotated_transformer.attention import MultiHeadAttention, attention, causal_mask
from annotated_transformer.attention_maps import attention_maps
from annotated_transformer.batches import collate
from annotated_transformer.kernels import (
    FastDropout, LossModule, accelerate, fused_attention, linear_cross_entropy, r_drop_loss)
from annotated_transformer.relative_positions import RelativeConfig, RelativeTransformer
from annotated_transformer.trainer import TrainConfig
from annotated_transformer.training import label_smoothing_loss
from annotated_transformer.transformer import Transformer, TransformerConfig

SIZES = {'vocab_size': 23, 'n_layers': 2, 'd_model': 16, 'd_ff': 24, 'n_heads': 4}


@pytest.mark.parametrize('n', [3, 40, 41, 70])
@pytest.mark.parametrize('masked', [False, True])
def test_fused_attention(n, masked):
    torch.manual_seed(n)
    query = torch.randn(2, 3, 5, 4, requires_grad=True)
    key = torch.randn(2, 3, n, 4, requires_grad=True)
    value = torch.randn(2, 3, n, 6, requires_grad=True)
    mask = None
    if masked:
        mask = torch.rand(2, 1, 5, n) < 0.6
        mask[0, 0, 1] = False # a fully masked query
    results = []
    for function in (attention, fused_attention):
        output, _ = function(query, key, value, mask)
        results.append([output, *torch.autograd.grad((output * output.detach().cos()).sum(), (query, key, value))])
    for expected, found in zip(*results):
        assert_close(found, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        found, _ = fused_attention(query, key, value, mask)
    assert_close(found, results[0][0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_attention_trains_in_float32_when_all_else_is_bfloat16_on_a_cpu(monkeypatch, dtype):
    "Under autocast the inputs may be float32 (rotary positions) or bfloat16. Without a gradient, nothing is cast."
    computed, kept = [], []
    original = kernels.F.scaled_dot_product_attention
    to_bfloat16 = kernels.to_bfloat16

    def record(query, *args, **kwargs):
        computed.append((query.dtype, torch.is_autocast_enabled('cpu')))
        return original(query, *args, **kwargs)

    def record_kept(saved):
        found = to_bfloat16(saved)
        kept.append((found.dim(), found.dtype))
        return found

    monkeypatch.setattr(kernels.F, 'scaled_dot_product_attention', record)
    monkeypatch.setattr(kernels, 'to_bfloat16', record_kept)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 5, 4).to(dtype).requires_grad_() for _ in range(3)]
    mask = causal_mask(5)
    with torch.autocast('cpu', torch.bfloat16):
        output, _ = fused_attention(*inputs, mask)
    gradients = torch.autograd.grad(output.float().square().sum(), inputs)
    assert output.dtype == torch.bfloat16
    assert computed == [(torch.float32, False)]
    assert kept.count((4, torch.bfloat16)) == 4 and (4, torch.float32) not in kept # queries, keys, values, output
    assert (3, torch.float32) in kept                                             # the log-sum of each row
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(attention(*exact, mask)[0].square().sum(), exact)
    for found, right in zip(gradients, expected):
        assert_close(found.float(), right, atol=2e-2, rtol=2e-2)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        fused_attention(*[x.detach() for x in inputs], mask)
    assert computed[1:] == [(dtype, True)]


@pytest.fixture
def kernel_calls(monkeypatch):
    "The masks that PyTorch's fused attention gets: None, 'causal' or a mask."
    calls = []
    original = kernels.F.scaled_dot_product_attention

    def record(query, key, value, attn_mask=None, is_causal=False):
        calls.append('causal' if is_causal else attn_mask)
        return original(query, key, value, attn_mask=attn_mask, is_causal=is_causal)

    monkeypatch.setattr(kernels.F, 'scaled_dot_product_attention', record)
    return calls


@pytest.mark.parametrize('positions', ['sinusoidal', 'rotary'])
@pytest.mark.parametrize('padded', [False, True])
def test_masks_that_flash_attention_cannot_take_are_left_out(kernel_calls, positions, padded):
    "In a batch without padding no mask is passed on; with padding, decoder self-attention is causal. Same gradients."
    torch.manual_seed(0)
    if positions == 'rotary':
        model = RelativeTransformer(RelativeConfig(**SIZES, dropout=0.0))
    else:
        model = Transformer(TransformerConfig(**SIZES, dropout=0.0))
    rows = [(torch.randint(4, 23, (9,)).tolist(), torch.randint(4, 23, (7,)).tolist()) for _ in range(3)]
    if padded:
        rows[1] = (rows[1][0][:5], rows[1][1][:4])
    batch = collate(rows)
    results = []
    for fast in (False, True):
        if fast:
            accelerate(model)
        logits = model(batch.src, batch.tgt_in)
        loss = (logits * logits.detach().cos()).sum()
        results.append([logits, *torch.autograd.grad(loss, list(model.parameters()))])
    for expected, found in zip(*results):
        assert_close(found, expected, atol=1e-4, rtol=1e-4)
    encoder, decoder = kernel_calls[:2], kernel_calls[2:]
    assert decoder[::2] == ['causal', 'causal']
    for mask in (*encoder, *decoder[1::2]):
        assert (mask is not None) == padded


def test_a_mask_is_compared_once_unless_it_changes(monkeypatch):
    compared = []
    monkeypatch.setattr(kernels, 'causal_mask', lambda *args: compared.append(args) or causal_mask(*args))
    mask = causal_mask(5)
    assert [kernels.mask_kind(mask) for _ in range(3)] == ['causal'] * 3
    assert len(compared) == 1
    mask[4, 0] = False
    assert kernels.mask_kind(mask) == 'other'
    mask.fill_(True)
    assert kernels.mask_kind(mask) == kernels.mask_kind(None) == 'none'
    assert kernels.mask_kind(causal_mask(5)[:4]) == kernels.mask_kind(causal_mask(5)[None]) == 'other'
    with torch.inference_mode():
        assert kernels.mask_kind(causal_mask(5)) == 'other'


@pytest.mark.parametrize('label_smoothing', [0.0, 0.1])
@pytest.mark.parametrize('chunk_size', [None, 1, 7, 50, 51, 64])
@pytest.mark.parametrize('with_bias', [False, True])
def test_chunked_loss(label_smoothing, chunk_size, with_bias):
    torch.manual_seed(0)
    hidden = torch.randn(51, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(30, dtype=torch.float64, requires_grad=True) if with_bias else None
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    targets = torch.randint(0, 30, (51,))
    found = linear_cross_entropy(hidden, weight, targets, label_smoothing, bias, chunk_size)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = label_smoothing_loss(logits, targets, label_smoothing) * 51
    assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(3 * found, inputs), torch.autograd.grad(3 * expected, inputs)):
        assert_close(a, b)
    with torch.no_grad():
        assert_close(linear_cross_entropy(hidden, weight, targets, label_smoothing, bias, chunk_size), expected)


def test_chunked_loss_survives_large_logits():
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [2.0], [-1.0]])
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 2]))
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()


def test_chunk_size_must_be_positive():
    with pytest.raises(ValueError, match='chunk_size=0'):
        hidden = torch.randn(2, 3, requires_grad=True)
        linear_cross_entropy(hidden, torch.randn(5, 3), torch.tensor([1, 2]), chunk_size=0)


@pytest.mark.parametrize('label_smoothing', [0.0, 0.1])
def test_r_drop(label_smoothing):
    torch.manual_seed(0)
    hidden1, hidden2 = (torch.randn(20, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 30, (20,))
    log_p = (hidden1 @ weight.T).log_softmax(-1)
    log_q = (hidden2 @ weight.T).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum() + (log_q.exp() * (log_q - log_p)).sum()
    expected = 4.0 / 2 * kl
    for hidden in (hidden1, hidden2):
        expected = expected + 20 * label_smoothing_loss(hidden @ weight.T, targets, label_smoothing)
    found = r_drop_loss(hidden1, hidden2, weight, targets, label_smoothing, r_drop=4.0, chunk_size=6)
    assert_close(found, expected)
    inputs = (hidden1, hidden2, weight)
    for a, b in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs)):
        assert_close(a, b)


@pytest.mark.slow
def test_compiled_r_drop_loss_is_the_same_and_is_compiled_once(monkeypatch):
    "`compile_loss`: one compilation serves batches with any number of tokens."
    plain = inspect.unwrap(kernels.r_drop_loss_and_gradient) # the type checks of the tests cannot be compiled
    monkeypatch.setattr(kernels, 'r_drop_loss_and_gradient', plain)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    results = {}
    for compile_loss in (False, True):
        torch.manual_seed(0)
        model = Transformer(TransformerConfig(**SIZES, dropout=0.3)).train()
        loss_module = LossModule(model, TrainConfig(compile_loss=compile_loss))
        loss_module.r_drop = 5.0
        results[compile_loss] = []
        for lengths in ((3, 5), (7, 2, 9), (4, 4, 4, 11)):
            batch = collate([([4 + i % 19 for i in range(n)], [22 - i % 19 for i in range(n)]) for n in lengths])
            torch.manual_seed(1)
            loss = loss_module(batch)
            results[compile_loss] += [loss, *torch.autograd.grad(loss, list(model.parameters()))]
        assert counters['stats']['unique_graphs'] == int(compile_loss)
    for expected, found in zip(results[False], results[True]):
        assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('p', [0.1, 0.5])
def test_fast_dropout(p):
    torch.manual_seed(0)
    x = torch.ones(500, 401)
    dropped = FastDropout(p)(x)
    assert abs((dropped == 0).float().mean().item() - p) < 5e-3
    assert_close(dropped.unique(), torch.tensor([0.0, 1 / (1 - p)]), atol=1e-3, rtol=0)
    columns = (dropped == 0).float()
    assert abs((columns[:, 0] * columns[:, 1]).mean() - p * p) < 0.06 # neighbours are independent
    assert torch.equal(FastDropout(p).eval()(x), x)


def test_fast_dropout_repeats_with_the_seed():
    x = torch.randn(30, 7)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(FastDropout(0.3)(x))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize('positions', ['sinusoidal', 'rotary', 'alibi'])
def test_accelerated_model_computes_the_same(positions):
    torch.manual_seed(0)
    if positions == 'sinusoidal':
        model = Transformer(TransformerConfig(**SIZES)).eval()
    else:
        model = RelativeTransformer(RelativeConfig(**SIZES, positions=positions)).eval()
    src, tgt = torch.randint(4, 23, (2, 3, 50))
    src[0, 30:] = 0
    maps = attention_maps(model, src[:1], tgt[:1])
    logits = model(src, tgt)
    assert accelerate(model) is model
    assert_close(model(src, tgt), logits, atol=1e-4, rtol=1e-4)
    for a, b in zip(attention_maps(model, src[:1], tgt[:1]), maps): # recording still sees the weights
        assert_close(a, b)


def test_training_step_has_the_gradients_of_the_reference():
    "Fused attention and the chunked loss together; dropout is off."
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**SIZES, dropout=0.0))
    src, tgt = torch.randint(4, 23, (2, 3, 12))
    src[0, 7:] = 0
    targets = tgt[:, 1:].flatten()
    loss = label_smoothing_loss(model(src, tgt[:, :-1]).flatten(0, 1), targets, 0.1) * len(targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    accelerate(model)
    hidden = model.hidden_states(src, tgt[:, :-1]).flatten(0, 1)
    found = linear_cross_entropy(hidden, model.lm_head.weight, targets, 0.1, chunk_size=8)
    assert_close(found, loss, atol=1e-4, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(found, list(model.parameters())), expected):
        assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_projections_share_one_bfloat16_copy_of_their_input():
    "Under autocast, the backward pass keeps one copy of a self-attention's input instead of three."
    torch.manual_seed(0)
    inputs = torch.randn(2, 5, 16)
    found = []
    for prepare in (kernels.accelerate, lambda module: module):
        torch.manual_seed(1)
        mha = prepare(nn.Sequential(MultiHeadAttention(16, 4)))[0]
        kept = []

        def keep(saved):
            if saved.dtype == torch.bfloat16 and saved.numel() == inputs.numel() and saved.size(-1) == 16:
                kept.append(saved.data_ptr())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved), torch.autocast('cpu', torch.bfloat16):
            output = mha(inputs, inputs, inputs)
        gradients = torch.autograd.grad(output.float().square().sum(), mha.parameters())
        found.append((kept, output, gradients))
    (shared, output, gradients), (separate, expected_output, expected) = found
    assert len(set(separate)) - len(set(shared)) == 2
    assert_close(output, expected_output, atol=2e-2, rtol=2e-2)
    for gradient, right in zip(gradients, expected):
        assert_close(gradient, right, atol=5e-2, rtol=5e-2)
    kernels_only = kernels.accelerate(nn.Sequential(MultiHeadAttention(16, 4)))[0]
    assert kernels_only(inputs, inputs, inputs).dtype == torch.float32 # without autocast, nothing is cast


def test_a_second_accelerate_changes_nothing(monkeypatch):
    calls = []
    monkeypatch.setattr(kernels, 'cast_once', lambda mha, inputs: calls.append(mha))
    model = accelerate(Transformer(TransformerConfig(**SIZES)))
    assert accelerate(model) is model
    model(torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9]]))
    assert len(calls) == len(set(calls)) == 6 # each attention casts its inputs once


def test_accelerate_leaves_other_attention_functions_alone():
    mha = MultiHeadAttention(8, 2)
    mha.attention_fn = lambda query, key, value, mask=None: (value, None)
    function = mha.attention_fn
    accelerate(mha)
    assert mha.attention_fn is function


@pytest.mark.parametrize('device, precision, lru_capacity, expected', [
    ('cpu', 'bfloat16', None, ['32', '32']),
    ('cpu', 'bfloat16', '7', ['32', '7']),
    ('cpu', 'float32', None, [None, None]),
    ('meta', 'bfloat16', None, [None, None])])
def test_the_caches_of_onednn_are_bounded_in_bfloat16_on_a_cpu(monkeypatch, device, precision, lru_capacity, expected):
    for name in kernels.ONEDNN_CACHES:
        monkeypatch.setenv(name, '') # so that it is restored afterwards
        del os.environ[name]
    if lru_capacity:
        monkeypatch.setenv('LRU_CACHE_CAPACITY', lru_capacity)
    with torch.device(device):
        model = Transformer(TransformerConfig(**SIZES))
    LossModule(model, TrainConfig(precision=precision))
    assert [os.environ.get(name) for name in kernels.ONEDNN_CACHES] == expected


@pytest.mark.parametrize('device, precision, is_slow, warns', [
    ('cpu', 'bfloat16', True, True),
    ('cpu', 'bfloat16', False, False),
    ('cpu', 'float32', True, False),
    ('meta', 'bfloat16', True, False)])
def test_a_cpu_that_is_slow_in_bfloat16_gets_a_warning(monkeypatch, device, precision, is_slow, warns):
    monkeypatch.setattr(kernels, 'bfloat16_is_slow', lambda: is_slow)
    with torch.device(device):
        model = Transformer(TransformerConfig(**SIZES))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        LossModule(model, TrainConfig(precision=precision))
    assert ['--precision bfloat16' in str(warning.message) for warning in found] == [True] * warns


@pytest.mark.parametrize('seconds, expected', [([0.001, 0.0004], False), ([0.001, 0.0019], False), ([0.001, 0.03], True)])
def test_bfloat16_is_slow_if_it_takes_more_than_twice_as_long(monkeypatch, seconds, expected):
    times = iter(seconds)
    monkeypatch.setattr(kernels.timeit, 'repeat', lambda run, number, repeat: [run().sum().item() * 0 + next(times)])
    assert kernels.bfloat16_is_slow.__wrapped__() is expected


GROW = '''
import torch
from annotated_transformer.kernels import bound_onednn_caches
def resident_mib():
    return int(next(line for line in open('/proc/self/status') if line.startswith('VmRSS')).split()[1]) // 1024
weight = torch.randn(256, 128)
weight @ torch.randn(128, 8)
if %s:
    bound_onednn_caches()
weight = weight.bfloat16()
torch.nn.functional.linear(torch.randn(9, 128).bfloat16(), weight)
before = resident_mib()
for n in range(10, 700):
    torch.nn.functional.linear(torch.randn(n, 128).bfloat16(), weight)
print(resident_mib() - before)
'''


def growth_mib(bounded):
    "Return the memory that 690 shapes need in a new process."
    environment = {name: value for name, value in os.environ.items() if name not in kernels.ONEDNN_CACHES}
    done = subprocess.run([sys.executable, '-c', GROW % bounded], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='memory is read from /proc')
def test_memory_does_not_grow_with_every_new_shape():
    "The variables are set after `import torch` and after a product in float32, and still in time."
    unbounded = growth_mib(bounded=False)
    if unbounded < 100:
        pytest.skip('this CPU does not compile products in bfloat16')
    assert growth_mib(bounded=True) < unbounded / 4
