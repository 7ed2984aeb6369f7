"Checks of loss, schedule, optimizer, accumulation, averaging and decoding."
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from annotated_transformer.batches import pad_rows
from annotated_transformer.decoding import beam_search, greedy
from annotated_transformer.training import (
    average_weights, label_smoothing_loss, learning_rate, make_optimizer, paper_peak_lr)
from annotated_transformer.training_checks import (
    check_accumulation, check_averaging, check_decoder, check_loss, check_optimizer, check_schedule)
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import EOS

CONFIG = TransformerConfig(vocab_size=19, n_layers=1, d_model=32, d_ff=48, n_heads=4, max_len=16)


# --- loss

def ours(logits, targets):
    return label_smoothing_loss(logits, targets, 0.1, ignore_index=0)

def torch_loss(reduction, **options):
    options = {'label_smoothing': 0.1, 'ignore_index': 0} | options
    return lambda logits, targets: F.cross_entropy(logits, targets, reduction=reduction, **options)

def dense(log_probs, targets):
    "The smoothed target as a matrix, as in the Annotated Transformer."
    q = torch.full_like(log_probs, 0.1 / (log_probs.size(1) - 2)).scatter(1, targets[:, None], 0.9)
    q[:, 0] = 0
    return F.kl_div(log_probs, q.masked_fill((targets == 0)[:, None], 0), reduction='sum')


@pytest.mark.parametrize('loss', [ours, torch_loss('sum'), torch_loss('mean'), torch_loss('none')])
def test_correct_losses_pass(loss):
    check_loss(loss, pad=0).raise_if_failed(strict=True)


def test_a_matrix_of_targets_is_correct_and_large():
    report = check_loss(dense, pad=0)
    assert report.failed == ['memory'] and 'KL divergence' in report['value'].observed
    check_loss(dense, pad=0, dense=True).raise_if_failed()
    assert 'takes log-probabilities' in report['value'].observed
    assert 'takes logits' in check_loss(ours, pad=0)['value'].observed


@pytest.mark.parametrize('loss, failed', [
    (torch_loss('mean', label_smoothing=0.0), ['value', 'padding']),
    (torch_loss('mean', ignore_index=-100), ['padding']),
    (lambda x, y: torch_loss('sum')(x, y) / len(y), ['padding']),
    (lambda x, y: ours(x.softmax(-1), y), ['value', 'padding', 'memory']),
    (lambda x, y: -(0.9 * F.one_hot(y, x.size(1)) + 0.1 / x.size(1)).mul(x.softmax(-1).log()).sum(-1).mean(),
     ['padding', 'certain', 'memory'])])
def test_wrong_losses_fail(loss, failed):
    assert check_loss(loss, pad=0).failed == failed


def test_padding_with_an_id_outside_the_vocabulary():
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=-100, reduction='sum')
    check_loss(loss, pad=-100).raise_if_failed()
    assert check_loss(ours, 0.2, pad=0).failed == ['value', 'padding']


def test_probabilities_that_do_not_sum_to_1_fail_where_padding_is_no_token():
    def divided_by_v_minus_2(logits, targets):
        q = torch.full_like(logits, 0.1 / (logits.size(1) - 2)).scatter(1, targets[:, None], 0.9)
        return -(q * logits.log_softmax(-1)).sum(-1)[targets >= 0].mean()
    targets = torch.tensor([3, 4])
    assert divided_by_v_minus_2(torch.zeros(2, 11), targets) > math.log(11) # sums to more than 1
    for pad in (None, -100):
        assert 'value' in check_loss(lambda x, y: divided_by_v_minus_2(x, y.clamp(min=0)), pad=pad, dense=True).failed


def test_a_loss_that_is_not_a_number_for_some_batches_fails():
    loss = lambda x, y: ours(x, y) * (1 if len(y) == 7 else math.nan) # noqa: E731
    assert 'value' in check_loss(loss, pad=0).failed


# --- schedule

def paper(step):
    return learning_rate(step, paper_peak_lr(512, 100), 100)


def test_correct_schedules_pass():
    check_schedule(paper, 100, peak_lr=paper_peak_lr(512, 100)).raise_if_failed(strict=True)
    check_schedule([paper(step + 1) for step in range(1000)], 100).raise_if_failed()
    check_schedule([paper(1) / 2, *map(paper, range(1, 1000))], 100).raise_if_failed() # counted from 0
    check_schedule([0.0, *map(paper, range(1, 1000))], 100).raise_if_failed()
    check_schedule(lambda step: 1e-3 * min(step / 100, (500 - step) / 400), 100, decays=False).raise_if_failed()


@pytest.mark.parametrize('schedule, failed', [
    (lambda step: paper(10 * step), ['peak', 'warm-up']),
    (lambda step: 512 ** -0.5 * min(20 * step ** -1 / 2, step * 100 ** -1.5), ['decay']),
    (lambda step: 512 ** -0.5 * min(step ** -1 / 2, step * 100 ** -1.5), ['peak', 'warm-up', 'decay', 'height']),
    (lambda step: 1e-3 * min((step / 100) ** 2, (100 / step) ** 0.5), ['warm-up', 'height']),
    (lambda step: 2 * paper(step), ['height']),
    (lambda step: 1 / (step - 1), ['runs']),
    ([0.0, 0.0, *map(paper, range(1, 1000))], ['runs']), ([1e-3] * 50, ['runs'])])
def test_wrong_schedules_fail(schedule, failed):
    assert check_schedule(schedule, 100, peak_lr=paper_peak_lr(512, 100)).failed == failed


# --- optimizer, accumulation, averaging

def test_optimizer_with_all_parameters():
    model = Transformer(CONFIG)
    check_optimizer(model, make_optimizer(model)).raise_if_failed()
    partial = torch.optim.Adam(model.encoder.parameters())
    assert 'src_embed.weight' in check_optimizer(model, partial)['complete'].observed
    assert not check_optimizer(Transformer(CONFIG), make_optimizer(model))
    model.src_embed.requires_grad_(False) # frozen, and known to the optimizer
    check_optimizer(model, torch.optim.Adam(model.parameters())).raise_if_failed()
    model.lm_head = nn.Linear(32, 19)
    assert not check_optimizer(model, make_optimizer(Transformer(CONFIG)))


def test_gradient_accumulation():
    torch.manual_seed(0)
    x = torch.randn(10, 3)
    y = torch.randn(10)

    def sum_over_all(model, batches):
        total = sum(len(x) for x, _ in batches)
        for x, y in batches:
            ((model(x)[:, 0] - y).square().sum() / total).backward()

    def sum_of_means(model, batches):
        for x, y in batches:
            (model(x)[:, 0] - y).square().mean().backward()

    parts = [(x[:2], y[:2]), (x[2:], y[2:])]
    check_accumulation(sum_over_all, nn.Linear(3, 1), (x, y), parts).raise_if_failed()
    assert check_accumulation(sum_of_means, nn.Linear(3, 1), (x, y), parts).failed == ['equal']


def test_averages():
    check_averaging(average_weights).raise_if_failed()

    def in_place(checkpoints):
        for name, x in checkpoints[0].items():
            for other in checkpoints[1:]:
                x.add_(other[name])
            x.div_(len(checkpoints))
        return checkpoints[0]

    constant = [{'gain': torch.full((4,), x), 'scale': torch.tensor([x])} for x in (0.1, 0.3, 0.7)]
    check_averaging(average_weights, constant).raise_if_failed()
    assert check_averaging(lambda checkpoints: checkpoints[-1], constant).failed == ['mean']
    mask = torch.full((3, 3), -math.inf).triu(1)
    buffers = [{'mask': mask, 'steps': torch.tensor(i), 'gain': torch.randn(4)} for i in (1, 2)]
    check_averaging(average_weights, buffers).raise_if_failed()
    assert check_averaging(lambda checkpoints: checkpoints[0] | {'mask': mask.zero_()}, buffers).failed
    for dtype in (torch.bfloat16, torch.float16):
        check_averaging(average_weights, [{'gain': torch.randn(99).to(dtype)} for _ in range(3)]).raise_if_failed()
    assert check_averaging(in_place).failed == ['unchanged']
    assert check_averaging(lambda checkpoints: sum(checkpoints)).failed == ['mean']


# --- decoding

@pytest.fixture(scope='module')
def model():
    torch.manual_seed(2)
    return Transformer(replace(CONFIG, tied=False, max_len=12)).eval()


@pytest.fixture(scope='module')
def src():
    torch.manual_seed(0)
    return pad_rows([torch.randint(4, 19, (n,)).tolist() for n in (3, 7, 5, 1, 6)], last=EOS)


def test_correct_decoding_passes(model, src):
    check_decoder(lambda src: greedy(model, src), model, src).raise_if_failed()

    def beam(src):
        best = [beam_search(model, row[row != 0][None])[0] for row in src]
        return [(h.ids, h.log_prob) for h in best]
    check_decoder(beam, model, src, greedy=False).raise_if_failed()


@pytest.mark.parametrize('change, failed', [
    (lambda ids: ids + [EOS, 5], 'end'), (lambda ids: [1, *ids], 'end'), (lambda ids: ids[::-1] + [4], 'greedy'),
    (lambda ids: [*ids[:2], EOS], 'greedy')])
def test_wrong_translations_fail(model, src, change, failed):
    assert failed in check_decoder(lambda src: [change(ids) for ids in greedy(model, src)], model, src).failed


def test_wrong_scores_batches_and_orders_fail(model, src):
    def log_prob(ids, row):
        logits = model(row[row != 0][None], torch.tensor([[1, *ids]])[:, :-1])[0].log_softmax(-1)
        return logits[range(len(ids)), ids].sum().item()

    def scored(src, error=0.0):
        return [(ids, log_prob(ids, row) + error) for ids, row in zip(greedy(model, src), src)]
    assert not check_decoder(scored, model, src, greedy=False).failed
    assert check_decoder(lambda src: scored(src, 1.0), model, src).failed == ['log-probability']
    assert 'alone' in check_decoder(lambda s: [ids[:s.size(1) // 2] for ids in greedy(model, s)], model, src).failed
    assert 'order' in check_decoder(lambda s: [greedy(model, s)[0]] * len(s), model, src, greedy=False).failed
    assert check_decoder(lambda s: greedy(model, s)[1:], model, src).failed == ['runs']


def prepared(src, results):
    "A decoding function that looks its results up: it is fast."
    by_sentence = {tuple(row[row != 0].tolist()): result for row, result in zip(src, results)}
    return lambda src: [by_sentence[tuple(row[row != 0].tolist())] for row in src]


def test_greedy_decoding_that_stops_too_early_fails(model, src):
    found = greedy(model, src)
    first_two = prepared(src, [ids[:2] for ids in found])
    two_more = prepared(src, [ids[:int((row != 0).sum()) + 2] for ids, row in zip(found, src)]) # than the source
    assert check_decoder(first_two, model, src).failed == ['complete']
    assert check_decoder(two_more, model, src).failed == ['complete']
    check_decoder(first_two, model, src, max_length=2).raise_if_failed()
    check_decoder(two_more, model, src, max_length=lambda n: n + 2).raise_if_failed()
    assert check_decoder(first_two, model, src, max_length=3).failed == ['complete']
    assert check_decoder(two_more, model, src, max_length=lambda n: n + 3).failed == ['complete']


def test_one_convention_must_explain_all_log_probabilities(model, src):
    def score(ids, row, eos):
        log_probs = model(row[row != 0][None], torch.tensor([[1, *ids]])).log_softmax(-1)[0]
        return log_probs[range(len(ids)), ids].sum().item() + eos * log_probs[-1, EOS].item()

    found = [ids[:5] for ids in greedy(model, src)]

    def scored(*eos): # how often EOS counts, in each sentence
        return prepared(src, [(ids, score(ids, row, n)) for ids, row, n in zip(found, src, eos)])

    def failed(decode, **options):
        return check_decoder(decode, model, src, greedy=False, **options).failed
    assert failed(scored(1, 1, 1, 1, 1)) == failed(scored(0, 0, 0, 0, 0)) == []
    assert failed(scored(0, 1, 0, 1, 0)) == failed(scored(2, 2, 2, 2, 2)) == ['log-probability']
    assert failed(scored(0, 1, 0, 1, 0), max_length=5) == [] # some may be truncated
    assert failed(scored(*[math.nan] * 5)) == ['log-probability']

    best = [beam_search(model, row[row != 0][None], max_extra_tokens=2)[0] for row in src]
    beam = prepared(src, [(h.ids, h.log_prob) for h in best])
    assert failed(beam, max_length=lambda n: n + 2) == []


@pytest.mark.parametrize('bos', [0, EOS])
def test_decoding_that_begins_with_padding_or_eos(model, src, bos):
    def ending(src, tgt):
        return model(src, tgt) + F.one_hot(torch.tensor(EOS), 19) * torch.arange(tgt.size(1))[:, None] / 2

    @torch.no_grad()
    def decode(src):
        found = []
        for row in src:
            ids = []
            while len(ids) < 8 and EOS not in ids:
                ids.append(ending(row[row != 0][None], torch.tensor([[bos, *ids]]))[0, -1, 1:].argmax().item() + 1)
            found.append(ids)
        return found
    assert all(ids[-1] == EOS for ids in decode(src))
    check_decoder(decode, ending, src, bos=bos).raise_if_failed()
    assert 'end' in check_decoder(lambda src: [[bos, *ids] for ids in decode(src)], ending, src, bos=bos).failed


def test_decoding_from_the_last_token_alone_fails(model, src):
    "As with a cache, but without one."
    @torch.no_grad()
    def last_token_alone(src):
        output = torch.ones(len(src), 1, dtype=torch.long)
        for _ in range(8):
            logits = model(src, output[:, -1:])[:, -1]
            logits[:, :2] = -math.inf
            output = torch.cat([output, logits.argmax(-1, keepdim=True)], 1)
        return [ids[:ids.index(EOS)] if EOS in ids else ids for ids in output[:, 1:].tolist()]
    assert 'greedy' in check_decoder(last_token_alone, model, src).failed
