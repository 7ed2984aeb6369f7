"benchmarks/train_speed.py: that what it counts is what is done, and that the others do the same work as ours."
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from annotated_transformer.v1.batches import Batch
from annotated_transformer.v1.losses import label_smoothing_loss
from annotated_transformer.v1.transformer import Transformer, TransformerConfig, count_parameters
from annotated_transformer.v1.vocabulary import PAD

SCRIPT = Path(__file__).resolve().parents[2]/'benchmarks/train_speed.py'
CONFIG = TransformerConfig(vocab_size=50, n_layers=2, d_model=16, d_ff=40, n_heads=2, max_len=32)
NEEDS_TRANSFORMERS = pytest.mark.skipif(importlib.util.find_spec('transformers') is None,
                                        reason="needs the extra 'bench'")
OTHERS = ['nn.Transformer', pytest.param('Marian', marks=NEEDS_TRANSFORMERS)]


@pytest.fixture(scope='module')
def speed():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location('train_speed', SCRIPT)
        module = importlib.util.module_from_spec(spec)
        sys.modules['train_speed'] = module
        spec.loader.exec_module(module)
        yield module
    finally: sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def batch():
    g = torch.Generator().manual_seed(0)
    src, tgt = torch.randint(4, 50, (6, 9), generator=g), torch.randint(4, 50, (6, 8), generator=g)
    src[0, 5:], tgt[1, 4:], tgt[2, 6:] = PAD, PAD, PAD
    return Batch(src, tgt)


def test_counted_operations_are_those_that_torch_counts(speed, batch):
    whole, model = Batch(batch.src.clamp(min=4), batch.tgt.clamp(min=4)), Transformer(CONFIG)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        label_smoothing_loss(model(whole.src, whole.tgt_in), whole.tgt_out).backward()
    assert speed.flops(whole, CONFIG) == counter.get_total_flops()


def test_the_floor_multiplies_those_shapes(speed, batch):
    step = speed.floor(CONFIG, 'cpu', torch.float32)
    with FlopCounterMode(display=False) as counter: step(batch)
    assert counter.get_total_flops() == speed.flops(batch, CONFIG)


@pytest.mark.parametrize('name', OTHERS)
@pytest.mark.parametrize('everywhere', [True, False])
def test_the_others_have_our_size_and_both_ways_to_the_loss_agree(speed, batch, name, everywhere):
    build = {'nn.Transformer': speed.torch_transformer, 'Marian': speed.marian}[name]
    torch.manual_seed(0)
    model, loss = build(replace(CONFIG, dropout=0.), everywhere)
    torch.manual_seed(0)
    _, other = build(replace(CONFIG, dropout=0.), not everywhere)
    assert abs(count_parameters(model)/count_parameters(Transformer(CONFIG)) - 1) < 0.05
    torch.testing.assert_close(loss(batch), other(batch))
    wider = Batch(nn.functional.pad(batch.src, (0, 3), value=PAD), nn.functional.pad(batch.tgt, (0, 2), value=PAD))
    torch.testing.assert_close(loss(wider), loss(batch))               # padding counts for nothing


@pytest.mark.parametrize('name', OTHERS)
def test_the_others_drop_where_ours_drops(speed, batch, name):
    model, loss = {'nn.Transformer': speed.torch_transformer, 'Marian': speed.marian}[name](
        replace(CONFIG, dropout=0.5), False)
    dropped = []
    true = nn.functional.dropout
    def counting(x, p=0.5, training=True, inplace=False):
        if training and p: dropped.append(x.numel())
        return true(x, p, training, inplace)
    nn.functional.dropout = counting
    try: loss(batch)
    finally: nn.functional.dropout = true
    places = batch.src.numel(), batch.tgt_in.numel()
    assert sum(dropped) == 16*(places[0]*(1 + 2*2) + places[1]*(1 + 3*2))  # embeddings, and each sublayer's output


def test_every_switch_makes_a_step_that_learns(speed, batch):
    size = speed.Size(CONFIG, 64)
    for name in speed.SWITCHES:
        if name == 'compiled': continue                                   # a minute each time
        _, step = speed.contender(name, size, 'cpu', 'float32')
        speed.RATE = 0.01
        losses = [step(batch) for _ in range(8)]
        assert losses[-1] < losses[0], name


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_the_script_writes_a_record(tmp_path):
    code = ('import sys, train_speed as t; from annotated_transformer.v1.transformer import TransformerConfig as C; '
            't.SIZES["tiny"] = t.Size(C(vocab_size=300, n_layers=1, d_model=16, d_ff=16, n_heads=2), 64); t.main()')
    out = tmp_path/'record.json'
    subprocess.run([sys.executable, '-c', code, '--sizes', 'tiny', '--repeats', '1', '--steps', '1',
                    '--threads', '1', '--device', 'cpu', '--data-dir', str(tmp_path/'none'), '--out', str(out)],
                   cwd=SCRIPT.parent, check=True, capture_output=True)
    found = json.loads(out.read_text())['metrics']['tiny']
    assert found['corpus'].startswith('toy-ende') and found['speedup'] > 0 and 0 < found['share_of_floor']
    assert set(found['tokens_per_second']) == set(found['peak_mib']) and found['memory_ratio'] > 0
