"The recurrent translator: search agrees with teacher forcing however its state is moved; the library takes the model."
import json
import math

import pytest
import torch
from torch.testing import assert_close

from annotated_transformer.attention_maps import attention_maps
from annotated_transformer.batches import collate, pad_rows
from annotated_transformer.checkpoints import build_model, load_model, save_model
from annotated_transformer.checks import check_transformer
from annotated_transformer.decoding import score_translations
from annotated_transformer.inference import beam_search, greedy, sample
from annotated_transformer.recurrent import AlignmentModel, Recurrent, RecurrentConfig, RecurrentEncoder
from annotated_transformer.training import make_optimizer, train_step
from annotated_transformer.transformer import Transformer, TransformerConfig, count_parameters
from annotated_transformer.vocabulary import BOS, EOS, PAD

KINDS = ['additive', 'general']
SIZES = {'vocab_size': 30, 'n_layers': 2, 'd_model': 16, 'max_len': 40}
CHECKS = ['future', 'prefix', 'source padding', 'source order', 'past']


def new_model(attention='additive', **changes):
    "A small model in double precision, with logits that differ enough for hypotheses to overtake each other."
    torch.manual_seed(0)
    model = Recurrent(RecurrentConfig(attention=attention, **SIZES | changes)).double().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    return model


def sources(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return pad_rows([torch.randint(4, 30, (n - 1,), generator=generator).tolist() for n in lengths], last=EOS)


# --- sizes

@pytest.mark.parametrize('field, value, message', [
    ('d_model', 7, 'd_model=7 is odd'), ('d_model', 0, 'd_model=0 must be a whole number'),
    ('max_len', -1, 'max_len=-1'), ('dropout', 1.0, 'below 1')])
def test_impossible_sizes_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        RecurrentConfig(**{field: value})


@pytest.mark.parametrize('n_layers', [1, 3])
@pytest.mark.parametrize('tied', [True, False])
def test_any_number_of_layers_tied_or_not(n_layers, tied):
    model = new_model(n_layers=n_layers, tied=tied)
    assert (model.src_embed.weight is model.lm_head.weight) == tied
    assert model(sources(5, 3), sources(4, 4)).shape == (2, 4, 30)
    n_more = 0 if tied else 2 * 30 * 16
    assert count_parameters(model) == count_parameters(new_model(n_layers=n_layers)) + n_more


# --- parts

@pytest.mark.parametrize('attention', KINDS)
def test_alignment_logits_follow_their_equations(attention):
    torch.manual_seed(0)
    model = AlignmentModel(6, attention)
    query = torch.randn(2, 3, 6)
    encoder_output = torch.randn(2, 5, 6)
    logits = model(query, model.keys(encoder_output))
    for s in range(2):
        for i in range(3):
            for j in range(5):
                key = model.k_proj.weight @ encoder_output[s, j]
                if attention == 'general':
                    expected = query[s, i] @ key
                else:
                    expected = model.score.weight[0] @ (model.q_proj(query[s, i]) + key).tanh()
                assert_close(logits[s, i, j], expected)


def test_encoder_ignores_padding_in_both_directions():
    torch.manual_seed(0)
    encoder = RecurrentEncoder(RecurrentConfig(d_model=6, n_layers=2)).eval()
    x = torch.randn(2, 7, 6)
    output, hidden, cell = encoder(x, torch.tensor([7, 4]))
    alone, last_hidden, last_cell = encoder(x[1:, :4], torch.tensor([4]))
    assert_close(output[1:, :4], alone)
    assert_close(hidden[:, 1:], last_hidden)
    assert_close(cell[:, 1:], last_cell)
    assert_close(hidden[-1, :, :3], torch.stack([output[0, 6, :3], output[1, 3, :3]])) # left to right: the last word
    assert_close(hidden[-1, :, 3:], output[:, 0, 3:])                                  # right to left: the first word


def test_attention_weights_sum_to_1_and_are_0_on_padding():
    model = new_model()
    src = sources(7, 3)
    tgt = sources(5, 5)
    _, weights = model.run(src, tgt)
    assert weights.shape == (2, 5, 7) and (weights[1, :, 3:] == 0).all()
    assert_close(weights.sum(-1), torch.ones(2, 5).double())
    maps = model.attention_maps(src[:1], tgt[:1])
    assert maps[:2] == (None, None)
    assert_close(maps[2], weights[:1, None])


# --- search

@pytest.mark.parametrize('attention', KINDS)
@pytest.mark.parametrize('seed', range(2))
def test_moved_hypotheses_continue_from_their_own_tokens(attention, seed):
    "Random tokens, parents and removed sentences; at every step the whole prefix gives the same logits."
    model = new_model(attention)
    src = sources(7, 3, 5, 1)
    draw = torch.Generator().manual_seed(seed)
    state = model.decoder_state(src)
    prefixes = [[[]] for _ in src]
    last = torch.full((4, 1), BOS)
    with torch.inference_mode():
        for _ in range(6):
            for row, hypotheses in enumerate(prefixes):
                for j, prefix in enumerate(hypotheses):
                    prefix.append(last[row, j].item())
            logits = state.logits(last)
            for row, hypotheses in enumerate(prefixes):
                expected = model(src[[row] * len(hypotheses)], torch.tensor(hypotheses))[:, -1]
                assert_close(logits[row], expected, rtol=0, atol=1e-12)
            n_next = 1 + torch.randint(4, (), generator=draw).item()
            parents = torch.randint(last.size(1), (len(prefixes), n_next), generator=draw)
            state.reorder(parents)
            prefixes = [[list(hypotheses[p]) for p in row] for hypotheses, row in zip(prefixes, parents.tolist())]
            if len(prefixes) > 1 and torch.rand((), generator=draw) < 0.4:
                rows = torch.randperm(len(prefixes), generator=draw)[:-1]
                state.select_rows(rows)
                prefixes = [prefixes[i] for i in rows.tolist()]
                src = src[rows]
                parents = parents[rows]
            last = torch.randint(4, 30, parents.shape, generator=draw)


@pytest.mark.parametrize('attention', KINDS)
def test_log_probs_of_beam_search_are_those_of_teacher_forcing(attention):
    model = new_model(attention, tied=False)
    src = sources(9, 2, 6, 4)
    n_finished = 0
    with torch.no_grad(): # make EOS likely, so that some hypotheses finish
        usual = model.hidden_states(src, sources(5, 5, 5, 5, seed=1)).flatten(0, 1).mean(0)
        model.lm_head.weight[EOS] = 3 * usual / usual.norm()**2
        for row, hypotheses in zip(src, beam_search(model, src, beam_size=5, n_best=5, max_extra_tokens=8)):
            assert len(hypotheses) == 5
            for found in hypotheses:
                truncated = len(found.ids) == int((row != PAD).sum()) + 8
                if truncated:
                    continue
                expected = score_translations(model, row[None], [found.ids])[0].item()
                assert math.isclose(found.log_prob, expected, abs_tol=1e-5)
                n_finished += 1
    assert n_finished > 5


def test_batch_order_and_padding_do_not_change_translations():
    model = new_model()
    src = sources(9, 2, 6, 4)
    order = torch.tensor([2, 0, 3, 1])
    expected = [found[0].ids for found in beam_search(model, src, beam_size=3, max_extra_tokens=8)]
    shuffled = [found[0].ids for found in beam_search(model, src[order], beam_size=3, max_extra_tokens=8)]
    padded = torch.nn.functional.pad(src, (0, 4))
    assert [found[0].ids for found in beam_search(model, padded, beam_size=3, max_extra_tokens=8)] == expected
    assert shuffled == [expected[i] for i in order]
    assert [found.ids for found in greedy(model, src, max_extra_tokens=8)] == [
        found[0].ids for found in beam_search(model, src, beam_size=1, max_extra_tokens=8)]
    drawn = sample(model, src, generator=torch.Generator().manual_seed(1), max_extra_tokens=8)
    assert len({tuple(found.ids) for found in drawn}) > 1


def test_empty_sources_and_empty_batches():
    model = new_model()
    tgt = torch.tensor([[BOS, 5], [BOS, 5]])
    logits = model(torch.tensor([[PAD, PAD], [7, EOS]]), tgt)
    assert logits.isfinite().all()
    assert_close(logits[1:], model(torch.tensor([[7, EOS]]), tgt[1:]))
    no_src = torch.zeros(0, 4, dtype=torch.long)
    hidden = model.hidden_states(no_src, torch.zeros(0, 3, dtype=torch.long))
    model.lm_head(hidden).sum().backward() # an empty shard has zero gradients, not missing ones
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


# --- checks, training, folders

@pytest.mark.parametrize('attention', KINDS)
def test_information_flows_as_in_every_translator(attention):
    torch.manual_seed(0)
    model = Recurrent(RecurrentConfig(attention=attention, **SIZES))
    assert not check_transformer(model, tied=True, only=CHECKS).failed


def test_an_encoder_that_reads_padding_is_found():
    class Careless(RecurrentEncoder):
        def forward(self, x, lengths):
            return super().forward(x, torch.full_like(lengths, x.size(1)))
    model = new_model().float()
    model.encoder.__class__ = Careless
    assert check_transformer(model, tied=True, only=['source padding', 'future']).failed == ['source padding']


@pytest.mark.parametrize('attention', KINDS)
def test_it_overfits_one_batch(attention):
    torch.manual_seed(0)
    model = Recurrent(RecurrentConfig(attention=attention, **SIZES | {'dropout': 0.1}))
    batch = collate([([5, 6, 7], [7, 6, 5]), ([8, 9], [9, 8]), ([4, 5, 6, 7], [7, 6, 5, 4])])
    optimizer = make_optimizer(model)
    losses = [train_step(model, batch, optimizer, 1e-2, label_smoothing=0.0) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize('attention', KINDS)
def test_a_folder_gives_back_the_same_model(tmp_path, attention):
    model = new_model(attention).float()
    save_model(model, tmp_path)
    assert json.loads((tmp_path / 'config.json').read_text())['kind'] == 'recurrent'
    loaded = load_model(tmp_path)
    assert type(loaded) is Recurrent and loaded.config == model.config and not loaded.training
    assert loaded.lm_head.weight is loaded.tgt_embed.weight
    assert_close(loaded(sources(5, 3), sources(4, 4)), model(sources(5, 3), sources(4, 4)), rtol=0, atol=0)


def test_each_config_builds_its_own_kind():
    transformer = TransformerConfig(30, n_layers=1, d_model=16, d_ff=16, n_heads=2)
    assert type(build_model(transformer)) is Transformer
    assert type(build_model(RecurrentConfig(**SIZES))) is Recurrent


def test_attention_maps_hold_cross_attention_only():
    model = new_model().float()
    in_encoder, in_decoder, cross = attention_maps(model, sources(4), sources(5))
    assert in_encoder is None and in_decoder is None and cross.shape == (1, 1, 5, 4)
