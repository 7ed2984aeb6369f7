"Checks of a whole Transformer: correct models of many designs pass, each planted bug is found by the check meant for it."
import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from annotated_transformer.checks import CHECKS, check_transformer
from annotated_transformer.positions import SinusoidalPositions
from annotated_transformer.probes import (
    Checks, CountSines, NotApplicable, leaves, position_modules, training_without_dropout)
from annotated_transformer.recurrent import Recurrent, RecurrentConfig
from annotated_transformer.relative_positions import RelativeConfig, RelativeTransformer
from annotated_transformer.transformer import Transformer, TransformerConfig

BENCHMARKS = Path(__file__).resolve().parents[1] / 'benchmarks'
sys.path.insert(0, str(BENCHMARKS))
import bugs
import more_bugs

CONFIG = TransformerConfig(vocab_size=19, n_layers=1, d_model=32, d_ff=48, n_heads=4, max_len=16)
OURS = {
    'post-norm': CONFIG,
    'pre-norm, three layers': replace(CONFIG, norm='pre', n_layers=3),
    'learned positions': replace(CONFIG, positions='learned', n_layers=2),
    'untied, other head sizes': replace(CONFIG, tied=False, d_k=6, d_v=5),
    'large vocabulary': replace(CONFIG, vocab_size=3000),
}
CHEAP = [name for name in CHECKS if name not in ('overfit', 'mixed precision')]


def build(config=CONFIG):
    torch.manual_seed(0)
    return Transformer(config)


# --- correct models

@pytest.mark.parametrize('name', OURS)
def test_our_models_pass_every_check(name):
    config = OURS[name]
    only = () if config == CONFIG else CHEAP
    report = check_transformer(build(config), tied=config.tied, make=lambda: Transformer(config), only=only)
    report.raise_if_failed(strict=True)


@pytest.mark.parametrize('positions, failed', [('rotary', []), ('alibi', ['source order'])])
def test_relative_positions(positions, failed):
    "ALiBi with one slope for both directions cannot tell a source from its reversal."
    torch.manual_seed(0)
    config = RelativeConfig(19, n_layers=1, d_model=32, d_ff=48, n_heads=4, max_len=16, positions=positions)
    report = check_transformer(RelativeTransformer(config), make=lambda: RelativeTransformer(config),
                               positions='relative', tied=True, only=CHEAP)
    assert report.failed == failed and report.not_applicable == ['without positions']


@pytest.mark.parametrize('model_class', bugs.HELD_OUT, ids=lambda model_class: model_class.__name__)
def test_models_of_other_design_pass(model_class):
    assert not bugs.check_held_out(model_class).failed


def test_model_in_the_style_of_d2l_passes():
    report = more_bugs.check_d2l()
    assert not report.failed and report.not_applicable == ['encoder'], report


def test_a_bias_as_long_as_the_vocabulary_is_no_matrix():
    "An untied output layer with a bias made two checks not applicable."
    found = more_bugs.check_d2l('one AddNorm for the whole block', only=['separate weights', 'tied'])
    assert found.failed == ['separate weights'] and not found.not_applicable


def test_record_of_the_third_set_of_bugs():
    "Each row but the one of the test above is that of the present checks: a few are tried."
    record = json.loads((BENCHMARKS / 'results' / 'more-bugs.json').read_text('utf-8'))['bugs']
    names = [f'{model}: {bug}' for model, (_, planted) in more_bugs.MODELS.items() for bug in ('correct', *planted)]
    assert list(record) == names
    assert not any(record[f'{model}: correct']['failed'] for model in more_bugs.MODELS)
    for bug in 'lengths repeated in the wrong order', 'causal lengths from 0', 'table of positions not a buffer':
        assert more_bugs.check_d2l(bug, only=CHEAP).failed == record[f'd2l style: {bug}']['failed']
    pytest.importorskip('transformers', reason='an extra')
    for bug in 'positions of the decoder shifted', 'bias of the logits not saved':
        assert more_bugs.check_marian(bug, only=CHEAP).failed == record[f'Marian: {bug}']['failed']


def test_recurrent_model_passes():
    torch.manual_seed(0)
    config = RecurrentConfig(19, n_layers=1, d_model=32, max_len=16)
    report = check_transformer(Recurrent(config), make=lambda: Recurrent(config), tied=True,
                               skip=['without positions', 'overfit', 'mixed precision'])
    assert not report.failed, report


def test_marian_passes_and_its_missing_attention_mask_is_found():
    transformers = pytest.importorskip('transformers', reason='an extra')
    config = transformers.MarianConfig(
        vocab_size=23, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=16,
        pad_token_id=22, decoder_start_token_id=22, eos_token_id=0)
    torch.manual_seed(0)
    model = transformers.MarianMTModel(config)

    def call(model, src, tgt, **masks):
        return model(input_ids=src, decoder_input_ids=tgt, use_cache=False, **masks).logits

    def correct(model, src, tgt): return call(model, src, tgt, attention_mask=src.ne(22).long())
    report = check_transformer(model, correct, pad=22, tied=True, make=lambda: transformers.MarianMTModel(config),
                               only=CHEAP)
    assert not report.failed and report.not_applicable == ['device'], report
    assert check_transformer(model, call, pad=22, only=['source padding']).failed == ['source padding']


def test_log_probabilities_pass_as_logits():
    check_transformer(build(), lambda m, src, tgt: m(src, tgt).log_softmax(-1)).raise_if_failed()


def test_model_that_computes_in_32_bits_only_passes():
    def call(m, src, tgt): return m(src, tgt) @ torch.eye(19, device=src.device)
    check_transformer(build(), call).raise_if_failed()


def test_softmax_in_32_bits_is_not_a_bug(monkeypatch):
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, 'softmax', lambda x, dim: softmax(x.float(), dim).to(x.dtype))
    check_transformer(build(), only=['without positions', 'source padding', 'future']).raise_if_failed()


def test_skipped_checks_and_missing_properties():
    model = build(replace(CONFIG, dropout=0.0, positions='none'))
    report = check_transformer(model, positions='none', pad=None, skip=['dropout', 'initial loss'])
    assert not report.failed
    assert set(report.not_applicable) == {'source padding', 'target padding', 'source order', 'target order', 'tied',
                                          'state dict'}
    with pytest.raises(AssertionError, match='source padding'):
        report.raise_if_failed(strict=True)
    assert check_transformer(model, only=['dropout', 'source order'], positions='absolute').failed == [
        'source order', 'dropout']


def test_the_state_dict_needs_a_second_model_with_other_weights():
    "The first model's copy would share what is not saved, and so would a model built with the same seed."
    with bugs.context('random table, not saved'):
        model = bugs.build('random table, not saved')
        missing = check_transformer(model, only=['state dict'])
        same = check_transformer(model, only=['state dict'], make=lambda: bugs.build('random table, not saved'))
        other = check_transformer(model, only=['state dict'], make=lambda: bugs.build('random table, not saved', 1))
    assert missing.not_applicable == same.not_applicable == ['state dict']
    assert 'pass make=' in missing['state dict'].observed and 'another seed' in same['state dict'].observed
    assert other.failed == ['state dict']


def test_padding_that_is_looked_for_in_the_first_row_only_is_found():
    def first_row_decides(ids, pad):
        return ((ids != pad) | ~(ids[0] == pad).any())[:, None, None]
    with patch.object(bugs.transformer_module, 'padding_mask', first_row_decides):
        assert check_transformer(build(), only=['source padding']).failed == ['source padding']


# --- planted bugs

@pytest.mark.parametrize('name', [name for name, bug in bugs.BUGS.items() if bug.found_by])
def test_planted_bug_is_found(name):
    found_by = bugs.BUGS[name].found_by
    report = bugs.check(name, only=[found_by], steps=60)
    by_its_type = 'TypeCheckError' in report['runs'].observed # these tests check shapes as well
    assert found_by in report.failed or by_its_type


def test_bugs_out_of_reach_are_not_reported():
    "If one of these is found one day, the page's table must change."
    for name, bug in bugs.BUGS.items():
        if not bug.found_by:
            assert not bugs.check(name, only=CHEAP).failed, name


def test_record_is_of_the_present_bugs_and_checks():
    record = json.loads((BENCHMARKS / 'results' / 'bugs.json').read_text('utf-8'))
    assert list(record['bugs']) == ['correct', *bugs.BUGS] and record['checks'] == list(CHECKS)
    assert not record['bugs']['correct']['failed'] and not record['bugs']['correct']['not_applicable']
    for name, bug in bugs.BUGS.items():
        assert bug.found_by in record['bugs'][name]['failed'] if bug.found_by else not record['bugs'][name]['failed']
    for name in 'batch norm', 'tied by copying', 'padding not masked':
        failed = [check for check in record['bugs'][name]['failed'] if check in CHEAP]
        assert bugs.check(name, only=CHEAP).failed == failed
    assert len(record['held_out']) == sum(map(len, bugs.HELD_OUT.values())) + len(bugs.HELD_OUT)
    for name in 'dropout_p in eval mode', 'decoder blocks in a tuple':
        assert bugs.check_held_out(bugs.Plain, name).failed == record['held_out'][f'Plain: {name}']['failed']


def test_training_of_the_benchmark():
    assert bugs.train_and_test('used before assigned', 0, 20) == {'seed': 0, 'losses': [], 'correct': None}
    run = bugs.train_and_test('diagonal off by one', 0, 40)
    assert len(run['losses']) == 2 and run['correct'] == 0


# --- the function and its report

def test_model_and_random_numbers_are_left_as_they_were():
    model = build().train()
    model.decoder.eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    check_transformer(model, steps=3, tied=True)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(q.grad is None for q in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_raises_fails_the_first_check_and_no_other_applies():
    report = check_transformer(nn.Linear(2, 2), lambda m, src, tgt: m(src))
    assert report.failed == ['runs'] and len(report.not_applicable) == len(CHECKS) - 1
    assert not report
    with pytest.raises(AssertionError, match='1 of .* checks did not pass'):
        report.raise_if_failed()


def test_wrong_arguments_are_named():
    for options, message in [({'positions': 'learned'}, "'absolute', 'relative' or 'none'"),
                             ({'only': ['futur']}, "unknown checks .'futur'"), ({'skip': ['drop']}, "unknown checks"),
                             ({'lengths': (2, 5)}, 'at least 3 tokens')]:
        with pytest.raises(ValueError, match=message):
            check_transformer(build(), **options)


def test_a_tuple_of_outputs_is_explained():
    report = check_transformer(build(), lambda m, src, tgt: (m(src, tgt), None))
    assert 'pass call=' in report['runs'].observed


def test_report_shows_what_was_observed_and_where_to_look():
    report = bugs.check('diagonal off by one', only=['future', 'tied'])
    text = repr(report)
    assert 'FAILED  future' in text and 'off by one' in text and 'passed  tied' in text
    assert f'observed:  {report["future"].observed}' in text


class WithoutPositions(bugs.TorchModel):
    "TorchModel whose sinusoids are not a module, or left out."
    def __init__(self, sinusoids=None):
        super().__init__()
        del self.positions
        self.__dict__['positions'] = lambda x, batch_axis: x if sinusoids is None else sinusoids(x)


def test_positions_without_a_module_need_the_model_without_them():
    def sinusoids(x): return x + bugs.sinusoids(x.size(1), 24).to(x.dtype)
    torch.manual_seed(0)
    model = WithoutPositions(sinusoids)
    report = check_transformer(model, only=['without positions', 'source order'])
    assert report.not_applicable == ['without positions'] and not report.failed
    assert 'pass without_positions=' in report['without positions'].observed
    bare = WithoutPositions()
    bare.load_state_dict(model.state_dict())
    check_transformer(model, only=['without positions'], without_positions=bare).raise_if_failed(strict=True)
    assert bare.training and next(bare.parameters()).dtype == torch.float32


def test_a_causal_encoder_is_found_with_a_copy_without_positions():
    for bug, failed in (None, []), ('is_causal in the encoder', ['without positions']):
        torch.manual_seed(0)
        model = bugs.Plain(bug)
        flat = copy.deepcopy(model)
        nn.init.zeros_(flat.wpe.weight)
        assert check_transformer(model, without_positions=flat, only=['without positions']).failed == failed


def test_a_module_that_embeds_tokens_and_positions_is_not_switched_off():
    class TokenAndPositionEmbedding(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) + torch.arange(ids.size(1), device=ids.device)[:, None] / 10

    torch.manual_seed(0)
    model = WithoutPositions()
    model.src_embed = TokenAndPositionEmbedding(17, 24)
    report = check_transformer(model, only=['without positions'])
    assert 'also embeds the tokens' in report['without positions'].observed


def test_a_model_without_positions_that_ignores_its_source_is_not_applicable():
    class Unordered(WithoutPositions): # no *position* in its name
        pass

    torch.manual_seed(0)
    report = check_transformer(Unordered(), lambda model, src, tgt: model(torch.ones_like(src), tgt),
                               positions='none', only=['without positions'])
    assert report.not_applicable == ['without positions']
    assert report['without positions'].observed == 'the logits ignore the source'


# --- tools for checks

def test_position_modules_are_found_by_name():
    modules = nn.ModuleDict(dict(pos_embed=nn.Embedding(3, 2), pe=nn.Identity(), positionwise_ffn=nn.Linear(2, 2),
                                 pos_ffn=nn.Linear(2, 2), span=nn.Identity(), compose=nn.Identity()))
    assert list(position_modules(modules)) == ['pos_embed', 'pe']
    assert list(position_modules(build())) == ['src_positions', 'tgt_positions']


def test_leaves_and_sines():
    w = torch.randn(3, requires_grad=True)
    assert [leaf is w for leaf in leaves((w * torch.randn(3) + w).sum())] == [True]
    with CountSines() as sines:
        math.sin(1.0)
        torch.ones(3).cos()
    assert sines.count == 2


def test_training_without_dropout_restores_the_mode_of_each_module():
    model = build().eval()
    model.decoder.train()
    before = [module.training for module in model.modules()]
    src = torch.randint(4, 10, (2, 5))
    with pytest.raises(ZeroDivisionError), training_without_dropout(model):
        assert model.training and torch.equal(model(src, src), model(src, src))
        1 / 0
    assert [module.training for module in model.modules()] == before and len(set(before)) == 2


def test_a_check_of_your_own():
    checks = Checks()

    @checks.add('half', 'the half is above 1', 'the number')
    def half(number):
        if number < 0:
            raise NotApplicable('pass a positive number')
        return number / 2 > 1, f'{number / 2}'

    @checks.add('inverse', 'it has an inverse', 'zero')
    def inverse(number):
        return 1 / number > 0, 'computed'

    assert checks.run('4', 4).raise_if_failed().names(True) == ['half', 'inverse']
    assert checks.run('0', 0).failed == ['half', 'inverse']
    assert 'ZeroDivisionError' in checks.run('0', 0)['inverse'].observed
    assert checks.run('-1', -1).not_applicable == ['half']


class Gpt(nn.Module):
    "A decoder-only model made of `nn.TransformerEncoder`; without the mask, `future` and `prefix` should fail."
    def __init__(self, has_mask=True):
        super().__init__()
        self.embed = nn.Embedding(19, 32)
        self.positions = SinusoidalPositions(32, 16)
        self.core = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2)
        self.lm_head = nn.Linear(32, 19)
        self.has_mask = has_mask

    def forward(self, ids):
        future = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).triu(1)
        return self.lm_head(self.core(self.positions(self.embed(ids)), mask=future if self.has_mask else None))


@pytest.mark.parametrize('has_mask', [True, False])
def test_decoder_only_models_are_checked_as_page_45_says(has_mask):
    def call(model, src, tgt):
        return model(torch.cat([src, tgt], dim=1))[:, src.size(1):]
    torch.manual_seed(0)
    skip = ['without positions', 'overfit', 'mixed precision', 'device']
    report = check_transformer(Gpt(has_mask), call, pad=None, skip=skip)
    assert report.failed == ([] if has_mask else ['future', 'prefix'])
    assert {'encoder', 'source padding', 'target padding'} <= set(report.not_applicable)


class WithMasks(Transformer):
    "The signature of the Annotated Transformer: masks are arguments, and a generator returns log-probabilities."
    def forward(self, src, tgt, src_mask, tgt_mask):
        x = self.src_positions(self.src_embed(src) * math.sqrt(self.config.d_model))
        y = self.tgt_positions(self.tgt_embed(tgt) * math.sqrt(self.config.d_model))
        encoder_output = self.encoder(self.dropout(x), src_mask[:, None])
        return self.decoder(self.dropout(y), encoder_output, tgt_mask[:, None], src_mask[:, None])

    def generator(self, x):
        return self.lm_head(x).log_softmax(-1)


@pytest.mark.parametrize('causal', [True, False])
def test_models_with_masks_as_arguments_are_checked_as_page_45_says(causal):
    def call(model, src, tgt):
        src_mask = (src != 0).unsqueeze(-2)
        tgt_mask = (tgt != 0).unsqueeze(-2)
        if causal:
            tgt_mask = tgt_mask & torch.ones(1, tgt.size(1), tgt.size(1), device=tgt.device).tril().bool()
        return model.generator(model(src, tgt, src_mask, tgt_mask))
    torch.manual_seed(0)
    report = check_transformer(WithMasks(CONFIG), call, tied=True, make=lambda: WithMasks(CONFIG), only=CHEAP)
    assert report.failed == ([] if causal else ['future', 'prefix']) and not report.not_applicable, report
