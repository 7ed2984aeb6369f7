"Replacing parts of a computation: patches, ablations, and gradients at the attention logits."
import copy

import pytest
import torch
from torch.testing import assert_close

from annotated_transformer import decoding
from annotated_transformer.attention_maps import change_attention
from annotated_transformer.batches import Batch
from annotated_transformer.causal_tests import (
    Site, ablate, edit_heads, edit_output, head_outputs, logit_difference, logit_gradients, patch, patching_effect,
    record_sites)
from annotated_transformer.inference import greedy
from annotated_transformer.kernels import accelerate
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import BOS, EOS, PAD

SMALL = TransformerConfig(vocab_size=29, n_layers=2, d_model=16, d_ff=20, n_heads=4, d_k=4, d_v=3, dropout=0.0,
                          max_len=24)
ENCODER = 'encoder.layers.1.self_attention'
CROSS = 'decoder.layers.0.cross_attention'


@pytest.fixture
def model():
    torch.manual_seed(0)
    found = Transformer(SMALL).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1, 0.3) # a bias of 0 would hide mistakes
    return found


@pytest.fixture
def batch():
    torch.manual_seed(1)
    src = torch.randint(4, 29, (3, 7))
    tgt = torch.randint(4, 29, (3, 6))
    src[:, -1] = EOS
    tgt[:, 0] = BOS
    src[1, 4:] = torch.tensor([EOS, PAD, PAD])
    tgt[1, 3:] = PAD
    return Batch(src, tgt)


def other_than(batch):
    "A batch of the same shape with other words."
    is_word = batch.src > 3
    return torch.where(is_word, 4 + (batch.src + 3) % 25, batch.src)


@torch.no_grad()
def logits(model, batch):
    return model(batch.src, batch.tgt_in)


def test_a_sentence_patched_with_its_own_activations_is_unchanged(model, batch):
    sites = [Site('encoder.layers.0'), Site(ENCODER, (1, 2), (0, 3)), Site(CROSS, None, (1,))]
    with patch(model, record_sites(model, batch.src, batch.tgt_in, sites)):
        assert_close(logits(model, batch), logits(model, batch))
        patched = logits(model, batch)
    assert_close(patched, logits(model, batch))


def test_a_patched_encoder_output_gives_the_output_of_the_other_sentence(model, batch):
    other = other_than(batch)
    with patch(model, record_sites(model, other, batch.tgt_in, [Site('encoder')])):
        patched = logits(model, batch)
    assert_close(patched, logits(model, Batch(other, batch.tgt)))
    assert (patched - logits(model, batch)).abs().max() > 0.1


def test_a_patch_replaces_its_positions_and_heads_and_no_others(model, batch):
    other = other_than(batch)
    whole = Site(ENCODER, None, (0, 1, 2, 3))
    before = record_sites(model, batch.src, batch.tgt_in, [whole])[whole]
    site = Site(ENCODER, (0, 2), (1, 3))
    replacement = record_sites(model, other, batch.tgt_in, [site])
    with patch(model, replacement):
        after = record_sites(model, batch.src, batch.tgt_in, [whole])[whole]
    changed = torch.zeros(7, 4, dtype=torch.bool)
    changed[0, [1, 3]] = changed[2, [1, 3]] = True
    assert_close(after[:, ~changed], before[:, ~changed])
    assert_close(after[:, changed], replacement[site][:, changed])
    assert not torch.allclose(after[:, changed], before[:, changed])


def test_recorded_activations_are_those_before_a_later_patch(model, batch):
    "What was recorded is a copy: editing the next run must not change it."
    site = Site('encoder.layers.0')
    recorded = record_sites(model, batch.src, batch.tgt_in, [site])
    kept = recorded[site].clone()
    with patch(model, record_sites(model, other_than(batch), batch.tgt_in, [site])):
        logits(model, batch)
    assert torch.equal(recorded[site], kept)


def test_logit_difference_reads_the_last_real_position(model, batch):
    first, second = torch.tensor([5, 6, 7]), torch.tensor([8, 9, 10])
    found = logit_difference(model, batch.src, batch.tgt, first, second)
    alone = model(batch.src[1:2], batch.tgt[1:2, :3])[0, -1]
    assert_close(found[1], alone[6] - alone[9])
    assert_close(found[0], model(batch.src, batch.tgt)[0, -1, [5, 8]] @ torch.tensor([1.0, -1.0]))


def test_patching_effect_is_zero_without_and_one_with_everything(model, batch):
    first, second = torch.tensor([5, 6, 7]), torch.tensor([8, 9, 10])
    arguments = (model, batch.src, other_than(batch), batch.tgt, first, second)
    assert_close(patching_effect(*arguments, []), torch.zeros(3))
    assert_close(patching_effect(*arguments, [Site('encoder')]), torch.ones(3))


def test_zero_ablation_is_a_model_with_zeros_in_its_matrix(model, batch):
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        by_hand.get_submodule(CROSS).out_proj.weight[:, 2 * 3:3 * 3] = 0 # head 2; d_v is 3
    with ablate(model, {CROSS: [2]}):
        assert_close(logits(model, batch), logits(by_hand, batch))
    assert (logits(by_hand, batch) - logits(model, batch)).abs().max() > 0.01


def test_mean_and_resample_use_the_collected_outputs(model, batch):
    outputs = head_outputs(model, [batch])
    n_positions = {'encoder': int((batch.src != PAD).sum()), 'decoder': int((batch.tgt_out != PAD).sum())}
    assert len(outputs) == 6
    for name, found in outputs.items():
        assert found.shape == (n_positions[name.split('.')[0]], 4, 3)

    seen = {}
    def keep(activation):
        seen['heads'] = activation
        return activation
    for method in ('mean', 'resample'):
        with ablate(model, {ENCODER: [1, 3]}, method, outputs):
            with edit_heads(model.get_submodule(ENCODER), keep):
                logits(model, batch)
        heads = seen['heads']
        untouched = Site(ENCODER, None, (0,))
        whole = record_sites(model, batch.src, batch.tgt_in, [untouched])[untouched]
        assert_close(heads[:, :, [0, 2]], whole[:, :, [0, 2]])
        for head in (1, 3):
            bank = outputs[ENCODER][:, head]
            if method == 'mean':
                assert_close(heads[:, :, head], bank.mean(0).expand(3, 7, 3))
            else:
                distance = (heads[:, :, head].flatten(0, 1)[:, None] - bank).abs().amax(-1)
                assert distance.amin(1).max() == 0                # each is one of the collected outputs
                assert len(distance.argmin(1).unique()) > 5       # and not always the same one


def test_draws_repeat_with_the_seed(model, batch):
    outputs = head_outputs(model, [batch])
    found = []
    for seed in (0, 0, 1):
        with ablate(model, {ENCODER: [0]}, 'resample', outputs, seed):
            found.append(logits(model, batch))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def test_ablation_holds_during_cached_decoding(model, batch):
    "The cached search gives the tokens of the reference search under the same ablation."
    outputs = head_outputs(model, [batch])
    heads = {ENCODER: [0, 1], CROSS: [3], 'decoder.layers.1.self_attention': [2]}
    fast = accelerate(copy.deepcopy(model))
    untouched = greedy(fast, batch.src[:1], max_extra_tokens=4)[0]
    for method in ('zero', 'mean'):
        with ablate(fast, heads, method, outputs), ablate(model, heads, method, outputs):
            ablated = greedy(fast, batch.src[:1], max_extra_tokens=4)[0]
            assert ablated.log_prob != pytest.approx(untouched.log_prob, abs=0.01)
            for row in batch.src:
                src = row[row != PAD][None]
                cached = greedy(fast, src, max_extra_tokens=4)[0]
                reference = decoding.greedy(model, src, max_extra_tokens=4)
                assert cached.ids == reference[0]


def test_mistakes_are_named_and_no_hook_is_left_behind(model, batch):
    with pytest.raises(ValueError, match="'shuffle' is unknown: choose one of zero, mean, resample"):
        with ablate(model, {CROSS: [0]}, 'shuffle'):
            pass
    with pytest.raises(ValueError, match='needs the outputs of the heads'):
        with ablate(model, {CROSS: [0]}, 'mean'):
            pass
    with pytest.raises(KeyError):
        with ablate(model, {CROSS: [0]}), edit_output(model.encoder, lambda x: x):
            raise KeyError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_gradients_are_those_at_the_logits(model, batch):
    src = batch.src[:1]
    tgt = batch.tgt[:1, :4]
    targets = torch.tensor([5, 6, 7, 8])
    model = model.double()
    found = logit_gradients(model, src, tgt, targets)
    assert set(found) == {f'decoder.layers.{i}.cross_attention' for i in (0, 1)}
    for name, gradient in found.items():
        def log_prob(row, key, epsilon):
            def shift(weights):
                weights = weights.clone()
                weights[:, 1, row, key] *= torch.tensor(epsilon, dtype=torch.float64).exp()
                return weights / weights.sum(-1, keepdim=True)
            with torch.no_grad(), change_attention(model.get_submodule(name), shift):
                return model(src, tgt).log_softmax(-1)[0, row, targets[row]].item()
        for row, key in ((0, 0), (1, 3), (3, 6)):
            slope = (log_prob(row, key, 1e-4) - log_prob(row, key, -1e-4)) / 2e-4
            assert gradient[1, row, key].item() == pytest.approx(slope, abs=1e-6)
        assert_close(gradient.sum(-1), torch.zeros(4, 4, dtype=torch.float64))
