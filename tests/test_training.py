"Training: schedule, loss and step against independent computations; what a run must do and must not change."
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from annotated_transformer.batches import BatchLoader, collate
from annotated_transformer.training import (
    average_weights, batch_loss, label_smoothing_loss, learning_rate, make_optimizer, paper_peak_lr,
    perplexity, set_lr, train, train_step, validate)
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import PAD

CONFIG = TransformerConfig(vocab_size=20, n_layers=1, d_model=16, d_ff=32, n_heads=2, max_len=16)
PAIRS = [([4 + i % 16] * (1 + i % 5), [4 + (i + j) % 16 for j in range(1 + i % 3)]) for i in range(60)]


def new_model(dropout=0.0):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**{**vars(CONFIG), 'dropout': dropout}))


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize('d_model, warmup_steps', [(512, 4000), (1024, 4000), (128, 1000), (130, 7)])
def test_learning_rate_is_equation_3(d_model, warmup_steps):
    peak_lr = paper_peak_lr(d_model, warmup_steps)
    for step in range(1, 3 * warmup_steps, 7):
        printed = d_model ** -0.5 * min(step ** -0.5, step * warmup_steps ** -1.5)
        assert math.isclose(learning_rate(step, peak_lr, warmup_steps), printed, rel_tol=1e-12)
    assert learning_rate(warmup_steps, peak_lr, warmup_steps) == peak_lr


def test_one_step_of_warmup_means_none():
    assert learning_rate(1, 3.0, 1) == 3.0


@pytest.mark.parametrize('warmup_steps', [0, -4])
def test_warmup_takes_at_least_one_step(warmup_steps):
    with pytest.raises(ValueError, match=f'warmup_steps={warmup_steps} must be at least 1'):
        learning_rate(1, 3.0, warmup_steps)


def test_optimizer_has_the_papers_hyperparameters():
    optimizer = make_optimizer(nn.Linear(2, 2))
    assert isinstance(optimizer, torch.optim.Adam)
    assert (optimizer.defaults['betas'], optimizer.defaults['eps']) == ((0.9, 0.98), 1e-9)
    optimizer.add_param_group({'params': [nn.Parameter(torch.ones(1))]})
    set_lr(optimizer, 0.25)
    assert [group['lr'] for group in optimizer.param_groups] == [0.25, 0.25]


def test_adam_takes_noise_for_signal_as_the_page_says():
    "The root mean square of Adam's own updates: 1 at first, 0.23 later."
    torch.manual_seed(0)
    layer = nn.Linear(5000, 1, bias=False)
    optimizer = make_optimizer(layer)
    set_lr(optimizer, 1.0)
    sizes = []
    for _ in range(150):
        before = layer.weight.detach().clone()
        layer.weight.grad = torch.randn(1, 5000)
        optimizer.step()
        sizes.append((layer.weight - before).pow(2).mean().sqrt().item())
    assert abs(sizes[0] - 1) < 1e-3
    assert abs(sum(sizes[100:]) / 50 - math.sqrt(0.1 / 1.9)) < 0.01


@pytest.mark.parametrize('label_smoothing', [0.0, 0.1, 0.4])
@pytest.mark.parametrize('ignore_index', [None, PAD])
@pytest.mark.parametrize('shape', [(7,), (3, 5)])
def test_loss_and_gradient_equal_pytorchs(label_smoothing, ignore_index, shape):
    torch.manual_seed(0)
    logits = torch.randn(*shape, 11, requires_grad=True)
    targets = torch.randint(11, shape)
    targets.view(-1)[:2] = PAD
    ours = label_smoothing_loss(logits, targets, label_smoothing, ignore_index)
    ignored = {} if ignore_index is None else {'ignore_index': ignore_index}
    theirs = F.cross_entropy(logits.view(-1, 11), targets.view(-1), label_smoothing=label_smoothing, **ignored)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits))


def test_lowest_smoothed_loss_is_the_entropy_of_the_labels():
    v, eps = 50, 0.1
    logits = torch.zeros(1, v, requires_grad=True)
    optimizer = torch.optim.Adam([logits], 0.1)
    for _ in range(300):
        loss = label_smoothing_loss(logits, torch.tensor([4]), eps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    correct, other = 1 - eps + eps / v, eps / v
    entropy = -correct * math.log(correct) - (v - 1) * other * math.log(other)
    assert math.isclose(loss.item(), entropy, rel_tol=1e-4)


def test_batch_loss_reads_tgt_in_and_predicts_tgt_out():
    model = new_model().eval()
    batch = collate(PAIRS[:4])
    log_probs = model(batch.src, batch.tgt_in).log_softmax(-1)
    total = sum(log_probs[i, j, batch.tgt_out[i, j]] for i, j in (batch.tgt_out != PAD).nonzero().tolist())
    torch.testing.assert_close(batch_loss(model, batch), -total / batch.n_tokens)


def test_perplexity_of_a_uniform_guess_is_the_size_of_the_vocabulary():
    assert math.isclose(perplexity(math.log(37_000)), 37_000)


def test_step_is_gradient_descent_on_the_smoothed_loss():
    batch = collate(PAIRS[:8])
    model, expected = new_model(), new_model()
    gradients = torch.autograd.grad(batch_loss(expected, batch, 0.3), list(expected.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(expected.parameters(), gradients):
            parameter -= 0.5 * gradient
    optimizer = torch.optim.SGD(model.parameters(), lr=99.0)
    loss = train_step(model, batch, optimizer, 0.5, 0.3)
    assert math.isclose(loss, batch_loss(new_model(), batch, 0.3).item(), rel_tol=1e-6)
    torch.testing.assert_close(weights_of(model), weights_of(expected))


def test_gradients_of_two_steps_do_not_add_up():
    "The second step from the same weights makes the same update."
    batch = collate(PAIRS[:8])
    model = new_model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters())
    train_step(model, batch, optimizer, 0.5)
    once = weights_of(model)
    model.load_state_dict(start)
    train_step(model, batch, optimizer, 0.5)
    assert torch.equal(weights_of(model), once)


def test_step_switches_dropout_on_and_validation_switches_it_off():
    model = new_model(dropout=0.5)
    batch = collate(PAIRS[:8])
    model.eval()
    train_step(model, batch, make_optimizer(model), 0.0)
    assert model.training
    first = validate(model, [batch])
    assert not model.training
    assert validate(model, [batch]) == first


def test_validation_weighs_tokens_not_batches():
    model = new_model()
    small = list(BatchLoader(PAIRS, 12).epoch(0))
    large = list(BatchLoader(PAIRS, 1000).epoch(0))
    assert len(small) > 5 and len(large) == 1
    assert math.isclose(validate(model, small), validate(model, large), rel_tol=1e-5)
    assert math.isclose(validate(model, large), batch_loss(model, large[0]).item(), rel_tol=1e-6)
    mean_of_means = sum(batch_loss(model, batch).item() for batch in small) / len(small)
    assert abs(mean_of_means - validate(model, small)) > 1e-4 # the test can tell the difference


def test_train_logs_every_step_and_validates_after_each_epoch(capsys):
    model, loader = new_model(), BatchLoader(PAIRS, 40, seed=3)
    val_batches = [collate(PAIRS[:5])]
    log = train(model, loader, 2, 1e-2, 10, val_batches)
    n = len(loader)
    assert [entry['step'] for entry in log] == list(range(1, 2 * n + 1))
    assert [entry['lr'] for entry in log] == [learning_rate(step, 1e-2, 10) for step in range(1, 2 * n + 1)]
    assert [entry['step'] for entry in log if 'val_loss' in entry] == [n, 2 * n]
    assert log[-1]['val_loss'] == validate(model, val_batches)
    assert not model.training
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and printed[0].startswith('epoch 1: mean training loss ')
    mean_loss = sum(entry['loss'] for entry in log[n:]) / n
    assert printed[1] == f"epoch 2: mean training loss {mean_loss:.4f}, validation loss {log[-1]['val_loss']:.4f}"


def test_train_is_train_step_on_each_batch_of_each_epoch(capsys):
    "Epochs have different batches, each step its own learning rate, and the label smoothing that was asked for."
    loader = BatchLoader(PAIRS, 40, seed=3)
    model, expected = new_model(), new_model()
    log = train(model, loader, 2, 1e-2, 5, label_smoothing=0.2, progress=False)
    assert capsys.readouterr().out == ''
    optimizer = make_optimizer(expected)
    losses = []
    for epoch in range(2):
        for batch in loader.epoch(epoch):
            losses.append(train_step(expected, batch, optimizer, learning_rate(len(losses) + 1, 1e-2, 5), 0.2))
    assert [entry['loss'] for entry in log] == losses
    assert torch.equal(weights_of(model), weights_of(expected))
    assert not model.training and expected.training


def test_training_learns_and_the_same_seed_gives_the_same_model():
    loader = BatchLoader(PAIRS, 200)
    runs = []
    for _ in range(2):
        model = new_model(dropout=0.1)
        runs.append((model, train(model, loader, 30, 1e-2, 20, progress=False)))
    (model, log), (again, _) = runs
    assert validate(model, [collate(PAIRS)]) < 0.5 * log[0]['loss']
    assert torch.equal(weights_of(model), weights_of(again))


def test_average_of_weights():
    checkpoints = []
    for seed in range(3):
        torch.manual_seed(seed)
        checkpoints.append(Transformer(CONFIG).state_dict())
    mean = average_weights(checkpoints)
    assert mean.keys() == checkpoints[0].keys()
    for name, value in mean.items():
        torch.testing.assert_close(value, sum(weights[name] for weights in checkpoints) / 3)
        assert value.shape == checkpoints[0][name].shape
    new_model().load_state_dict(mean)
    alone = average_weights(checkpoints[:1])
    assert all(torch.equal(alone[name], checkpoints[0][name]) for name in alone)


def test_checkpoints_of_different_models_have_no_average():
    with pytest.raises(KeyError):
        average_weights([{'w': torch.ones(2), 'b': torch.ones(2)}, {'w': torch.ones(2)}])
    with pytest.raises(RuntimeError, match='equal size'):
        average_weights([{'w': torch.ones(2)}, {'w': torch.ones(3)}])
