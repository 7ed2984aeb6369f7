"""What the page of losses cannot show: other implementations, other processes,
and what happens inside a model that trains.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from annotated_transformer.v1.losses import label_smoothing_loss, linear_cross_entropy, r_drop_loss
from annotated_transformer.v1.optimizer import make_optimizer
from annotated_transformer.v1.transformer import Transformer, TransformerConfig

ROOT = Path(__file__).resolve().parents[2]
close = torch.testing.assert_close


def case(n=23, d=6, v=31, dtype=torch.float64, seed=0):
    "States of two passes, the output layer, its bias and the right words."
    g = torch.Generator().manual_seed(seed)
    def draw(*shape): return torch.randn(*shape, dtype=dtype, generator=g).requires_grad_()
    return draw(n, d), draw(n, d), draw(v, d), draw(v), torch.randint(v, (n,), generator=g)


def plain_r_drop(h1, h2, w, y, smoothing, alpha, bias=None):
    "Torch's own cross entropy and divergence, term by term."
    z1, z2 = F.linear(h1, w, bias), F.linear(h2, w, bias)
    nll = sum(F.cross_entropy(z, y, label_smoothing=smoothing, reduction='sum') for z in (z1, z2))
    p, q = z1.log_softmax(-1), z2.log_softmax(-1)
    kl = F.kl_div(q, p, reduction='sum', log_target=True) + F.kl_div(p, q, reduction='sum', log_target=True)
    return nll + alpha/2*kl


# --- other implementations

def test_against_transformers():
    "The label smoother of Hugging Face's Trainer, which averages over what is not padding."
    utils = pytest.importorskip('transformers.trainer_pt_utils', reason='transformers comes with the extra bench')
    logits, labels = torch.randn(3, 7, 11), torch.randint(11, (3, 7))
    labels[0, 4:] = -100
    for epsilon in (0.0, 0.1, 0.3):
        theirs = utils.LabelSmoother(epsilon=epsilon)({'logits': logits}, labels.clone())
        close(label_smoothing_loss(logits, labels, epsilon, ignore_index=-100), theirs)


@pytest.mark.parametrize('dtype, exact', [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize('n, v, chunk', [(1, 1, None), (1, 31, 5), (5, 31, 5), (23, 31, 5), (300, 7, None)])
def test_linear_cross_entropy_against_torch(n, v, chunk, dtype, exact):
    h, _, w, b, y = case(n=n, v=v, dtype=dtype)
    ours = linear_cross_entropy(h, w, y, 0.1, chunk, b)
    plain = F.cross_entropy(F.linear(h, w, b), y, label_smoothing=0.1, reduction='sum')
    close(ours, plain, rtol=exact, atol=exact*n)
    close(torch.autograd.grad(ours, (h, w, b)), torch.autograd.grad(plain, (h, w, b)), rtol=10*exact, atol=10*exact)


@pytest.mark.parametrize('chunk', [1, 4, 23, None])
@pytest.mark.parametrize('smoothing, alpha', [(0.0, 0.0), (0.0, 5.0), (0.1, 1.0), (0.3, 20.0)])
def test_r_drop_against_torch(smoothing, alpha, chunk):
    h1, h2, w, b, y = case()
    ours, plain = r_drop_loss(h1, h2, w, y, smoothing, alpha, chunk, b), plain_r_drop(h1, h2, w, y, smoothing, alpha, b)
    close(ours, plain)
    close(torch.autograd.grad(ours, (h1, h2, w, b)), torch.autograd.grad(plain, (h1, h2, w, b)))


def test_logits_that_overflow():
    "Logits of a thousand, and passes that disagree completely."
    h1, h2, w, _, y = case(dtype=torch.float32)
    for f in (lambda: linear_cross_entropy(500*h1, w, y, 0.1), lambda: r_drop_loss(500*h1, 500*h2, w, y, 0.1, 5.0)):
        loss = f()
        assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, (h1, w)))
    close(r_drop_loss(500*h1, 500*h2, w, y, 0.1, 5.0), plain_r_drop(500*h1, 500*h2, w, y, 0.1, 5.0))


def test_without_smoothing_a_forbidden_word_costs_nothing():
    logits = torch.tensor([[0., 0., -torch.inf]])
    close(label_smoothing_loss(logits, torch.tensor([1]), 0.), torch.tensor(2.).log())


def test_r_drop_in_16_bits():
    h1, h2, w, _, y = case(n=300, d=32, v=400, dtype=torch.float32)
    exact = torch.autograd.grad(plain_r_drop(h1, h2, w, y, 0.1, 5.0), (h1, h2, w))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        ours, plain = (f(h1, h2, w, y, 0.1, 5.0) for f in (r_drop_loss, plain_r_drop))
    assert ours.dtype == torch.float32
    off = [[((g - e).norm()/e.norm()).item() for g, e in zip(torch.autograd.grad(loss, (h1, h2, w)), exact)]
           for loss in (ours, plain)]
    assert all(a < 1.5*b + 1e-3 for a, b in zip(*off)), off


# --- what does not learn

@pytest.mark.parametrize('frozen', [(), (0,), (2,), (3,), (0, 1), (0, 1, 3), (2, 3), (0, 1, 2, 3)])
def test_what_is_frozen_gets_no_gradient_and_changes_none(frozen):
    whole = case()
    y = whole[-1]
    part = [x.detach() if i in frozen else x for i, x in enumerate(whole[:4])]
    for f in (lambda h1, h2, w, b: r_drop_loss(h1, h2, w, y, 0.1, 5.0, 4, b),
              lambda h1, h2, w, b: (linear_cross_entropy(h1, w, y, 0.1, 4, b)
                                    + linear_cross_entropy(h2, w, y, 0.1, 4, b))):
        learn = [i for i in range(4) if i not in frozen]
        close(f(*part), f(*whole[:4]))
        assert f(*part).requires_grad == bool(learn)
        if learn:
            expected = torch.autograd.grad(f(*whole[:4]), [whole[i] for i in learn])
            close(torch.autograd.grad(f(*part), [part[i] for i in learn]), expected)


@pytest.mark.parametrize('loss', ['plain', 'r_drop'])
def test_a_model_with_a_frozen_tied_matrix_learns(loss):
    "The matrix is source embedding, target embedding and output layer; none of them moves, and all else does."
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=40, n_layers=1, d_model=16, d_ff=32, n_heads=2,
                                          dropout=0.1)).train()
    model.output.weight.requires_grad_(False)
    frozen, before = model.output.weight.clone(), {name: p.detach().clone() for name, p in model.named_parameters()}
    src, tgt, y = (torch.randint(4, 40, (6, 5)) for _ in range(3))
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for group in optimizer.param_groups: group['lr'] = 0.01
    losses = []
    for _ in range(30):
        h1, h2 = model.states(src.repeat(2, 1), tgt.repeat(2, 1)).flatten(0, 1).chunk(2)
        if loss == 'plain': total = linear_cross_entropy(h1, model.output.weight, y.flatten(), 0.1)
        else: total = r_drop_loss(h1, h2, model.output.weight, y.flatten(), 0.1, 1.0)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    assert losses[-1] < 0.8*losses[0]
    assert torch.equal(model.output.weight, frozen) and model.src_embed.weight is model.output.weight
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize('loss', [linear_cross_entropy, r_drop_loss])
def test_without_grad_nothing_is_recorded_and_nothing_is_overwritten(loss):
    h1, h2, w, _, y = case()
    before = [x.detach().clone() for x in (h1, h2, w)]
    inputs = (h1, w, y) if loss is linear_cross_entropy else (h1, h2, w, y)
    with torch.no_grad(): quiet = loss(*inputs, label_smoothing=0.1)
    loud = loss(*inputs, label_smoothing=0.1)
    loud.backward()
    assert not quiet.requires_grad
    close(quiet, loud.detach())
    assert all(torch.equal(a, b) for a, b in zip((h1, h2, w), before))


def test_no_second_derivative():
    "Asked for one, it refuses instead of answering with zero."
    h, _, w, _, y = case()
    (g,) = torch.autograd.grad(linear_cross_entropy(h, w, y), h, create_graph=True)
    with pytest.raises(RuntimeError): g.sum().backward()


@pytest.mark.parametrize('call, said', [
    (lambda h, w, y: linear_cross_entropy(h, w, y, 1.0), 'smoothing=1.0'),
    (lambda h, w, y: linear_cross_entropy(h, w, y, chunk=0), 'at least one token'),
    (lambda h, w, y: r_drop_loss(h, h, w, y, alpha=-0.5), 'alpha=-0.5'),
    (lambda h, w, y: r_drop_loss(h, h, w, y, alpha=float('nan')), 'alpha=nan'),
    (lambda h, w, y: r_drop_loss(h, h, w, y, chunk=-1), 'at least one token')])
def test_settings_that_cannot_be(call, said):
    h, _, w, _, y = case()
    with pytest.raises(ValueError, match=said): call(h, w, y)


# --- two passes in one call

def test_both_halves_of_a_doubled_batch_have_their_own_dropout():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=40, n_layers=1, d_model=16, d_ff=32, n_heads=2, dropout=0.2))
    src, tgt = torch.randint(4, 40, (3, 5)), torch.randint(4, 40, (3, 4))
    def passes(): return model.states(src.repeat(2, 1), tgt.repeat(2, 1)).chunk(2)
    first, second = passes()
    assert (first - second).abs().mean() > 0.05
    model.eval()
    close(*passes())
    close(passes()[0], model.states(src, tgt))


# --- memory, as the operating system sees it

MEASURE = '''
import sys, torch
import torch.nn.functional as F
from annotated_transformer.v1.losses import linear_cross_entropy, r_drop_loss
torch.set_num_threads(1)
kind, n, d, v = sys.argv[1], 4096, 64, 16_000
h, w, y = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True), torch.randint(v, (n,))
linear_cross_entropy(h[:8], w, y[:8]).backward()
def peak(): # getrusage would count what the parent had when it started this process
    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))
before = peak()
if kind == 'plain': F.cross_entropy(F.linear(h, w), y, label_smoothing=0.1, reduction='sum').backward()
elif kind == 'chunked': linear_cross_entropy(h, w, y, 0.1).backward()
else: r_drop_loss(h, h.detach() + 0.1*torch.randn(n, d), w, y, 0.1).backward()
print((peak() - before)*1024)
'''


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='/proc is Linux')
def test_peak_memory_of_a_process():
    "What a process grows by: less than half a table of logits in chunks, more than two tables without."
    grown = {}
    for kind in ('plain', 'chunked', 'r_drop'):
        done = subprocess.run([sys.executable, '-c', MEASURE, kind], capture_output=True, text=True, cwd=ROOT,
                              env={**os.environ, 'OMP_NUM_THREADS': '1'})
        assert done.returncode == 0, done.stderr
        grown[kind] = int(done.stdout) / (4*4096*16_000)
    assert grown['plain'] > 2 and grown['chunked'] < 0.5 and grown['r_drop'] < 0.6, grown


def test_a_layer_of_ones_own():
    "Any linear layer will do, with gradients that accumulate as autograd's do."
    h, _, _, _, y = case(v=9)
    layer = nn.Linear(6, 9).double()
    for _ in range(2): linear_cross_entropy(h, layer.weight, y, 0.1, 4, layer.bias).backward()
    grads = h.grad, layer.weight.grad, layer.bias.grad
    h.grad = None
    layer.zero_grad()
    (2*F.cross_entropy(layer(h), y, label_smoothing=0.1, reduction='sum')).backward()
    close(grads, (h.grad, layer.weight.grad, layer.bias.grad))
