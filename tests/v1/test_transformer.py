"The whole model over every switch: shapes, what may reach what, the cache, gradients, and settings that are refused."
import json
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch
from torch.testing import assert_close

from annotated_transformer.v1.attention import padding_mask
from annotated_transformer.v1.batches import Batch
from annotated_transformer.v1.checkpoints import load_model, save_model
from annotated_transformer.v1.layers import DecoderCache
from annotated_transformer.v1.losses import label_smoothing_loss
from annotated_transformer.v1.training import Objective, TrainConfig
from annotated_transformer.v1.transformer import PRESETS, TABLE_3, Transformer, TransformerConfig, count_parameters
from annotated_transformer.v1.vocabulary import BOS, EOS, PAD

BASE = TransformerConfig(vocab_size=23, n_layers=2, d_model=16, d_ff=28, n_heads=4, dropout=0.0, max_len=9)
SWEEP = [replace(BASE, norm=norm, positions=positions, tied=tied, d_k=d_k, d_v=d_v)
         for norm, positions, tied, (d_k, d_v) in product(
             ('post', 'pre'), ('sinusoidal', 'learned'), (True, False), ((None, None), (3, 5), (3, None)))]
SWEEP += [replace(BASE, norm=norm, positions=positions, d_k=d_k, d_v=d_v, init=init)
          for norm, positions, (d_k, d_v), init in [
              ('post', 'alibi', (3, 5), 'glorot'), ('pre', 'alibi', (None, None), 'scaled'),
              ('post', 'rotary', (None, None), 'scaled'), ('pre', 'rotary', (6, 5), 'glorot')]]
SWEEP += [replace(BASE, activation=activation, tied=tied, norm=norm, output_bias=True) for activation, tied, norm in [
    ('swish', True, 'post'), ('gelu', False, 'pre')]]
SRC = torch.tensor([[11, 12, 13, 14, 15, 16, EOS], [7, 8, 9, EOS, PAD, PAD, PAD]]) # n = 7
TGT = torch.tensor([[BOS, 17, 18, 19, 20], [BOS, 21, 22, PAD, PAD]])               # m = 5

def called(c): return f"{c.norm}-{c.positions}-{'tied' if c.tied else 'untied'}-{c.d_k}-{c.d_v}-{c.activation}"

@pytest.fixture(params=SWEEP, ids=called)
def model(request):
    torch.manual_seed(0)
    return Transformer(request.param).eval()

def padded(ids, more): return torch.nn.functional.pad(ids, (0, more), value=PAD)

def test_shapes(model):
    memory = model.encode(SRC)
    assert memory.shape == (2, 7, 16)
    assert model.decode(TGT, memory, padding_mask(SRC, PAD)).shape == model.states(SRC, TGT).shape == (2, 5, 16)
    logits = model(SRC, TGT)
    assert logits.shape == (2, 5, 23) and logits.isfinite().all()
    assert_close(logits, model.output(model.states(SRC, TGT)))

@pytest.mark.parametrize('training', [False, True])
def test_no_logit_sees_a_later_token(model, training):
    model.train(training)
    logits = model(SRC, TGT)
    for i in range(1, 5):
        changed = TGT.clone()
        changed[:, i:] = 6
        other = model(SRC, changed)
        assert_close(other[:, :i], logits[:, :i], rtol=0, atol=1e-5)
        assert (other[0, i] - logits[0, i]).abs().max() > 1e-4  # ... while its own token does matter

def test_every_source_token_is_read_but_padding(model):
    logits = model(SRC, TGT)
    for row, n_real in ((0, 7), (1, 4)):
        for j in range(n_real):
            changed = SRC.clone()
            changed[row, j] = 5
            difference = (model(changed, TGT) - logits).abs().amax((1, 2))
            assert difference[row] > 1e-5 and difference[1 - row] < 1e-5, (row, j)

def test_padding_changes_nothing(model):
    logits = model(SRC, TGT)
    assert_close(model(padded(SRC, 2), TGT), logits, rtol=0, atol=1e-5)
    assert_close(model(SRC, padded(TGT, 3))[:, :5], logits, rtol=0, atol=1e-5)

def test_batch_mates_do_not_matter(model):
    logits = model(SRC, TGT)
    assert_close(model(SRC[:1], TGT[:1]), logits[:1], rtol=0, atol=1e-5)
    assert_close(model(SRC[1:, :4], TGT[1:, :3]), logits[1:, :3], rtol=0, atol=1e-5)

@pytest.mark.parametrize('pieces', [[1] * 5, [2, 2, 1], [5], [1, 4]], ids=str)
def test_cached_decoding_equals_uncached(model, pieces):
    memory, mask, cache = model.encode(SRC), padding_mask(SRC, PAD), DecoderCache(2)
    states = [model.decode(piece, memory, mask, cache) for piece in TGT.split(pieces, 1)]
    assert len(cache) == 5
    assert_close(torch.cat(states, 1), model.states(SRC, TGT), rtol=0, atol=1e-5)  # at padding too

def test_every_parameter_gets_a_gradient(model):
    model.train()
    loss = torch.nn.functional.cross_entropy(model(SRC, TGT[:, :-1]).flatten(0, 1), TGT[:, 1:].flatten(),
                                             ignore_index=PAD)
    loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []
    # keys' biases shift a query's scores all alike, which softmax ignores: their gradient is 0 but for rounding
    idle = [name for name, p in model.named_parameters() if p.grad.abs().max() == 0 and not name.endswith('key.bias')]
    assert idle == []

def test_tables_are_shared_or_not(model):
    tables = {id(t.weight) for t in (model.src_embed, model.tgt_embed, model.output)}
    assert len(tables) == (1 if model.config.tied else 3)
    other = Transformer(replace(model.config, tied=not model.config.tied))
    assert abs(count_parameters(other) - count_parameters(model)) == 2 * 23 * 16

def test_eval_is_deterministic_and_training_is_not(model):
    noisy = Transformer(replace(model.config, dropout=0.4))
    noisy.load_state_dict(model.state_dict())
    assert not torch.equal(noisy(SRC, TGT), noisy(SRC, TGT))
    noisy.eval()
    assert torch.equal(noisy(SRC, TGT), noisy(SRC, TGT))
    assert_close(noisy(SRC, TGT), model(SRC, TGT))  # dropout leaves no trace in eval

def test_whatever_is_made_on_the_way_is_made_where_the_ids_are(model):
    away = Transformer(model.config).to('meta')  # a device on which any tensor from elsewhere is an error
    assert away(SRC.to('meta'), TGT.to('meta')).device.type == 'meta'

def test_the_same_seed_draws_the_same_weights(model):
    torch.manual_seed(0)
    again = Transformer(model.config)
    for (name, p), (_, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q), name

def test_weights_survive_a_round_trip(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / 'weights.pt')
    torch.manual_seed(1)
    other = Transformer(TransformerConfig(**asdict(model.config))).eval()
    assert not torch.allclose(other(SRC, TGT), model(SRC, TGT))
    other.load_state_dict(torch.load(tmp_path / 'weights.pt', weights_only=True))
    assert torch.equal(other(SRC, TGT), model(SRC, TGT))
    saved = [name for name in model.state_dict() if 'positions' in name]
    assert len(saved) == (2 if model.config.positions == 'learned' else 0)

@pytest.mark.parametrize('positions', ['sinusoidal', 'learned', 'alibi', 'rotary'])
def test_a_sentence_that_is_too_long_is_refused(positions):
    model = Transformer(replace(BASE, positions=positions)).eval()
    full, over = torch.full((2, 9), 5), torch.full((2, 10), 5)
    assert model(full, full).shape == (2, 9, 23)  # exactly max_len fits
    with pytest.raises(ValueError, match='max_len=9'): model(over, TGT)
    with pytest.raises(ValueError, match='max_len=9'): model(SRC, over)
    memory, mask, cache = model.encode(SRC), padding_mask(SRC, PAD), DecoderCache(2)
    for _ in range(9): model.decode(full[:, :1], memory, mask, cache)
    with pytest.raises(ValueError, match='max_len=9'): model.decode(full[:, :1], memory, mask, cache)

@pytest.mark.parametrize('name', 'vocab_size n_layers d_model d_ff n_heads d_k d_v max_len'.split())
@pytest.mark.parametrize('size', [0, -1, -512])
def test_sizes_below_one_are_refused(name, size):
    with pytest.raises(ValueError, match=f'{name}={size} must be a positive whole number'):
        TransformerConfig(**{name: size})

@pytest.mark.parametrize('settings, words', [
    (dict(n_heads=7), 'd_model=512 is not divisible by n_heads=7: choose sizes that divide, or give d_k and d_v'),
    (dict(n_heads=7, d_k=64), 'd_model=512 is not divisible by n_heads=7'),
    (dict(n_heads=7, d_v=64), 'd_model=512 is not divisible by n_heads=7'),
    (dict(d_model=15, n_heads=5), 'd_model=15 is odd'),
    (dict(dropout=1.0), 'dropout=1.0'), (dict(dropout=-0.1), 'dropout=-0.1'),
    (dict(dropout=float('nan')), 'dropout=nan'),
], ids=str)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError, match=words): TransformerConfig(**settings)

@pytest.mark.parametrize('name, value, words', [
    ('norm', 'both', "norm='both' is unknown: choose post or pre"),
    ('positions', 'both', "positions='both' is unknown: choose sinusoidal or learned or alibi or rotary"),
    ('init', 'zero', "init='zero' is unknown: choose glorot or scaled"),
    ('activation', 'tanh', "activation='tanh' is unknown: choose relu or swish or gelu"),
    ('d_ff', 2.5, 'd_ff=2.5 must be a positive whole number'),
    ('d_model', None, 'd_model=None must be a positive whole number')])
def test_what_the_type_checker_would_stop_is_refused_without_it_too(name, value, words):
    config = replace(BASE)
    object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=words): config.__post_init__()

def test_a_folder_written_before_the_newest_settings_still_loads(tmp_path):
    torch.manual_seed(0)
    model = Transformer(BASE).eval()
    save_model(model, tmp_path)
    settings = json.loads((tmp_path/'config.json').read_text())
    for name in ('activation', 'output_bias', 'init'): settings.pop(name)
    (tmp_path/'config.json').write_text(json.dumps(settings))
    loaded = load_model(tmp_path)
    assert loaded.config == BASE and torch.equal(loaded(SRC, TGT), model(SRC, TGT))

@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize('r_drop', [0.0, 2.0])
def test_the_bias_of_the_output_learns_what_autograd_says(tied, r_drop):
    torch.manual_seed(0)
    model = Transformer(replace(BASE, tied=tied, output_bias=True, activation='swish'))
    torch.nn.init.normal_(model.output.bias)
    batch = Batch(SRC, torch.tensor([[BOS, 17, 18, 19, 20, EOS], [BOS, 21, 22, EOS, PAD, PAD]]))
    Objective(model, TrainConfig(label_smoothing=0.1, r_drop=r_drop))(batch).backward()
    chunked = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    # no dropout: both passes of R-Drop are one
    plain = label_smoothing_loss(model(SRC, batch.tgt_in), batch.tgt_out, 0.1, PAD, 'sum')
    plain.backward()
    for name, p in model.named_parameters(): assert_close(chunked[name], p.grad, atol=1e-5, rtol=1e-4, msg=name)
    assert model.output.bias.grad.abs().max() > 0.1

def test_unknown_names_are_refused():
    with pytest.raises(TypeError, match='d_modle'): TransformerConfig(d_modle=512)
    with pytest.raises(ValueError, match="'huge' is unknown: choose one of mini, tiny, base"):
        TransformerConfig.preset('huge')
    with pytest.raises(ValueError, match='n_heads=5'): TransformerConfig.preset('base', n_heads=5)

@pytest.mark.parametrize('name', list(PRESETS))
def test_every_preset_can_be_built(name):
    with torch.device('meta'): model = Transformer(PRESETS[name])
    millions = TABLE_3[name].millions if name in TABLE_3 else None
    if millions: assert abs(count_parameters(model) / 1e6 - millions) < 4.5  # page 04 works out the difference
