"The whole model under every switch: shapes, what may depend on what, gradients, weight tying, saving, and bad sizes."
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from annotated_transformer.attention import causal_mask, padding_mask
from annotated_transformer.transformer import PRESETS, Transformer, TransformerConfig, count_parameters
from annotated_transformer.vocabulary import BOS, EOS, PAD

CONFIG = TransformerConfig(vocab_size=23, n_layers=2, d_model=16, d_ff=28, n_heads=4, dropout=0.0, max_len=9)
CONFIGS = [ # every value of every switch, and most pairs
    CONFIG, replace(CONFIG, norm='pre'), replace(CONFIG, positions='learned', tied=False),
    replace(CONFIG, norm='pre', positions='learned', d_k=3, d_v=5), replace(CONFIG, positions='none', d_k=3, d_v=5),
    replace(CONFIG, norm='pre', positions='none', tied=False)]
SRC = torch.tensor([[11, 12, 13, 14, 15, 16, EOS], [7, 8, 9, EOS, PAD, PAD, PAD]]) # (2, 7)
TGT = torch.tensor([[BOS, 17, 18, 19, 20], [BOS, 21, 22, PAD, PAD]])               # (2, 5)
PRINTED_MILLIONS = [ # Table 3, all rows but big: changes to the base model, parameters in millions
    ({}, 65), (dict(d_k=16), 58), (dict(d_k=32), 60), (dict(n_layers=2), 36), (dict(n_layers=4), 50),
    (dict(n_layers=8), 80), (dict(d_model=256, d_k=32, d_v=32), 28), (dict(d_model=1024, d_k=128, d_v=128), 168),
    (dict(d_ff=1024), 53), (dict(d_ff=4096), 90)]


def name_of(config):
    return f"{config.norm}-{config.positions}-{'tied' if config.tied else 'untied'}-{config.d_k}-{config.d_v}"


@pytest.fixture(params=CONFIGS, ids=name_of)
def model(request):
    torch.manual_seed(0)
    return Transformer(request.param).eval()


def pad(ids, n):
    "Add `n` positions of padding on the right."
    return nn.functional.pad(ids, (0, n), value=PAD)


def close(a, b):
    assert_close(a, b, rtol=0, atol=1e-5)


def test_shapes(model):
    encoder_output = model.encode(SRC)
    assert encoder_output.shape == (2, 7, 16)
    hidden_states = model.decode(TGT, encoder_output, padding_mask(SRC, PAD))
    assert hidden_states.shape == (2, 5, 16)
    assert_close(model.hidden_states(SRC, TGT), hidden_states)
    logits = model(SRC, TGT)
    assert logits.shape == (2, 5, 23) and logits.isfinite().all()
    assert_close(logits, model.lm_head(hidden_states))


@pytest.mark.parametrize('training', [False, True])
def test_logits_depend_on_no_later_token(model, training):
    model.train(training)
    logits = model(SRC, TGT)
    for i in range(1, 5):
        changed = TGT.clone()
        changed[:, i:] = 6
        other = model(SRC, changed)
        close(other[:, :i], logits[:, :i])
        assert (other[0, i] - logits[0, i]).abs().max() > 1e-4 # but on their own token


def test_logits_depend_on_every_source_token_of_their_sentence(model):
    logits = model(SRC, TGT)
    for row, n in ((0, 7), (1, 4)):
        for j in range(n):
            changed = SRC.clone()
            changed[row, j] = 5
            difference = (model(changed, TGT) - logits).abs().amax((1, 2))
            assert difference[row] > 1e-5 and difference[1 - row] < 1e-5, (row, j)


def test_padding_changes_nothing(model):
    logits = model(SRC, TGT)
    close(model(pad(SRC, 2), TGT), logits)
    close(model(SRC, pad(TGT, 3))[:, :5], logits)


def test_other_sentences_change_nothing(model):
    logits = model(SRC, TGT)
    close(model(SRC[:1], TGT[:1]), logits[:1])
    close(model(SRC[1:, :4], TGT[1:, :3]), logits[1:, :3])


def test_every_parameter_gets_a_gradient(model):
    logits = model.train()(SRC, TGT[:, :-1]).flatten(0, 1)
    nn.functional.cross_entropy(logits, TGT[:, 1:].flatten(), ignore_index=PAD).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # a key's bias adds the same number to all logits of a query, so its gradient is zero
        assert parameter.grad.abs().max() > 0 or name.endswith('k_proj.bias'), name


def test_tied_matrices_are_one_tensor(model):
    matrices = [model.src_embed.weight, model.tgt_embed.weight, model.lm_head.weight]
    assert len({id(matrix) for matrix in matrices}) == (1 if model.config.tied else 3)
    other = Transformer(replace(model.config, tied=not model.config.tied))
    assert abs(count_parameters(other) - count_parameters(model)) == 2 * 23 * 16


def test_dropout_acts_in_training_only(model):
    noisy = Transformer(replace(model.config, dropout=0.4))
    noisy.load_state_dict(model.state_dict())
    assert not torch.equal(noisy(SRC, TGT), noisy(SRC, TGT))
    noisy.eval()
    assert_close(noisy(SRC, TGT), model(SRC, TGT))


def test_embedded_input_is_dropped_out():
    model = Transformer(replace(CONFIG, dropout=0.5))
    inputs = []
    def record(module, args):
        inputs.append(args[0])
    for stack in (model.encoder, model.decoder):
        stack.register_forward_pre_hook(record)
    model(SRC, TGT)
    for x in inputs:
        assert 0.2 < (x == 0).float().mean() < 0.8


def test_embeddings_are_multiplied_by_the_root_of_d_model():
    model = Transformer(replace(CONFIG, positions='none')).eval()
    received = []
    def record(module, args):
        received.append(args[0])
    model.encoder.register_forward_pre_hook(record)
    model.decoder.register_forward_pre_hook(record)
    model(SRC, TGT)
    assert_close(received, [4 * model.src_embed(SRC), 4 * model.tgt_embed(TGT)])


def test_works_on_the_device_of_the_ids(model):
    moved = Transformer(model.config).to('meta') # a device on which any tensor from elsewhere is an error
    assert moved(SRC.to('meta'), TGT.to('meta')).device.type == 'meta'


def test_same_seed_gives_same_weights(model):
    torch.manual_seed(0)
    for (name, a), b in zip(model.named_parameters(), Transformer(model.config).parameters(), strict=True):
        assert torch.equal(a, b), name


def test_state_dict_round_trip(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / 'weights.pt')
    torch.manual_seed(1)
    other = Transformer(TransformerConfig(**asdict(model.config))).eval()
    assert not torch.allclose(other(SRC, TGT), model(SRC, TGT))
    other.load_state_dict(torch.load(tmp_path / 'weights.pt', weights_only=True))
    assert torch.equal(other(SRC, TGT), model(SRC, TGT))
    tables = [name for name in model.state_dict() if 'positions' in name]
    assert len(tables) == (2 if model.config.positions == 'learned' else 0) # sinusoids are computed, not saved


@pytest.mark.parametrize('norm', ['post', 'pre'])
@pytest.mark.filterwarnings('ignore:enable_nested_tensor')
def test_equals_pytorch(norm):
    "Hidden states and the gradient of the shared matrix; page 04 refers to this test."
    torch.manual_seed(0)
    ours = Transformer(replace(CONFIG, norm=norm)).double()
    theirs = nn.Transformer(16, 4, 2, 2, 28, 0.0, batch_first=True, norm_first=norm == 'pre').double()
    if norm == 'post': # PyTorch ends its stacks with a layer norm; Figure 1 does not
        theirs.encoder.norm = theirs.decoder.norm = None
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        for stack in ('encoder', 'decoder'):
            a, b = getattr(ours, stack), getattr(theirs, stack)
            for x, y in zip(a.layers, b.layers, strict=True):
                pairs = [(x.self_attention, y.self_attn)]
                if stack == 'decoder':
                    pairs.append((x.cross_attention, y.multihead_attn))
                    y.norm3.load_state_dict(x.residual3.norm.state_dict())
                for mine, other in pairs:
                    parts = (mine.q_proj, mine.k_proj, mine.v_proj)
                    other.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
                    other.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
                    other.out_proj.load_state_dict(mine.out_proj.state_dict())
                y.linear1.load_state_dict(x.feed_forward.linear1.state_dict())
                y.linear2.load_state_dict(x.feed_forward.linear2.state_dict())
                y.norm1.load_state_dict(x.residual1.norm.state_dict())
                y.norm2.load_state_dict(x.residual2.norm.state_dict())
            if norm == 'pre':
                b.norm.load_state_dict(a.norm.state_dict())
    x, y = [embed(ids) * 4 + positions.table[:ids.size(1)] for embed, positions, ids in [
        (ours.src_embed, ours.src_positions, SRC), (ours.tgt_embed, ours.tgt_positions, TGT)]]
    outputs = [ours.hidden_states(SRC, TGT),
               theirs(x, y, tgt_mask=~causal_mask(5), src_key_padding_mask=SRC == PAD,
                      memory_key_padding_mask=SRC == PAD)]
    assert_close(*outputs)
    assert_close(*[torch.autograd.grad(output.square().sum(), ours.src_embed.weight)[0] for output in outputs])


@pytest.mark.parametrize('positions', ['sinusoidal', 'learned'])
def test_sentence_that_is_too_long_is_refused(positions):
    model = Transformer(replace(CONFIG, positions=positions)).eval()
    full, too_long = torch.full((2, 9), 5), torch.full((2, 10), 5)
    assert model(full, full).shape == (2, 9, 23)
    for src, tgt in ((too_long, TGT), (SRC, too_long)):
        with pytest.raises(ValueError, match='max_len=9'):
            model(src, tgt)


@pytest.mark.parametrize('name', ['vocab_size', 'n_layers', 'd_model', 'd_ff', 'n_heads', 'd_k', 'd_v', 'max_len'])
@pytest.mark.parametrize('size', [0, -1])
def test_sizes_below_one_are_refused(name, size):
    with pytest.raises(ValueError, match=f'{name}={size} must be a positive integer'):
        TransformerConfig(**{name: size})


@pytest.mark.parametrize('changes, message', [
    (dict(n_heads=7), 'd_model=512 is not divisible by n_heads=7: choose sizes that divide evenly, or set d_k and d_v'),
    (dict(n_heads=7, d_k=64), 'd_model=512 is not divisible by n_heads=7'),
    (dict(n_heads=7, d_v=64), 'd_model=512 is not divisible by n_heads=7'),
    (dict(d_model=15, n_heads=5), 'd_model=15 is odd'),
    (dict(dropout=1.0), 'dropout=1.0'), (dict(dropout=-0.1), 'dropout=-0.1'),
    (dict(dropout=float('nan')), 'dropout=nan'),
], ids=str)
def test_sizes_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**changes)


@pytest.mark.parametrize('name, value, message', [
    ('norm', 'both', "norm='both' is unknown: choose 'post' or 'pre'"),
    ('positions', 'both', "positions='both' is unknown: choose one of sinusoidal, learned, none"),
    ('d_ff', 2.5, 'd_ff=2.5 must be a positive integer'),
    ('d_model', None, 'd_model=None must be a positive integer')])
def test_wrong_types_are_refused_without_a_type_checker(name, value, message):
    config = replace(CONFIG)
    object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=message):
        config.__post_init__()


def test_config_is_frozen_and_knows_its_fields():
    with pytest.raises(AttributeError):
        CONFIG.d_model = 32
    with pytest.raises(TypeError, match='d_modle'):
        TransformerConfig(d_modle=512)


def test_presets():
    assert list(PRESETS) == ['toy', 'tiny', 'base', 'big'] and PRESETS['base'] == TransformerConfig()
    with torch.device('meta'):
        sizes = {name: count_parameters(Transformer(config)) for name, config in PRESETS.items()}
    assert sizes['base'] == 63_082_496 and sizes['big'] == 214_245_376
    assert sizes['toy'] < sizes['tiny'] < sizes['base'] < sizes['big']


@pytest.mark.parametrize('changes, millions', PRINTED_MILLIONS, ids=str)
def test_table_3_with_a_vocabulary_of_41_000(changes, millions):
    "All rows but big round to the printed count with one vocabulary size; page 04 works it out."
    with torch.device('meta'):
        model = Transformer(TransformerConfig(vocab_size=41_000, **changes))
    assert round(count_parameters(model) / 1e6) == millions


def test_count_parameters_counts_what_is_trained_once():
    pair = nn.Sequential(nn.Linear(5, 7), nn.Linear(5, 7))
    pair[1].weight = pair[0].weight
    assert count_parameters(pair) == 5 * 7 + 2 * 7
    pair[0].bias.requires_grad_(False)
    assert count_parameters(pair) == 5 * 7 + 7


def test_initialization(model):
    config = model.config
    for matrix in (model.src_embed.weight, model.tgt_embed.weight, model.lm_head.weight):
        assert abs(matrix.std() * config.d_model ** 0.5 - 1) < 0.15
    for stack in (model.encoder, model.decoder):
        for name, parameter in stack.named_parameters():
            if parameter.dim() == 2:
                bound = (6 / sum(parameter.shape)) ** 0.5
                assert 0.9 * bound < parameter.abs().max() <= bound, name


def test_first_loss_is_near_that_of_logits_with_variance_1():
    "Page 04 quotes these figures."
    config = TransformerConfig(60, n_layers=2, d_model=48, d_ff=80, n_heads=4, dropout=0.0, max_len=9)
    losses = []
    for seed in range(20):
        torch.manual_seed(seed)
        model = Transformer(config)
        target = torch.randint(4, 60, (32, 5))
        logits = model(torch.randint(4, 60, (32, 6)), nn.functional.pad(target, (1, 0), value=BOS))
        labels = nn.functional.pad(target, (0, 1), value=EOS)
        losses.append(nn.functional.cross_entropy(logits.mT, labels).item())
    assert 4.3 < min(losses) < 4.5 and 4.7 < max(losses) < 5
    assert abs(sum(losses) / 20 - (math.log(60) + 1 / 2)) < 0.1
