"""The recurrent translator: whatever a search does to its state, it says what teacher forcing says;
and every door takes it.
"""
import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from annotated_transformer.v1.batches import Batch, pad_rows
from annotated_transformer.v1.checkpoints import average_checkpoints, build, load_model, read_config, save_model
from annotated_transformer.v1.checks import check_transformer
from annotated_transformer.v1.cli import main
from annotated_transformer.v1.corpora import CorpusConfig
from annotated_transformer.v1.decoding import DecodingState, beam_search, greedy, sample, score_translations
from annotated_transformer.v1.optimizer import make_optimizer
from annotated_transformer.v1.recipe import default_run, train_translator
from annotated_transformer.v1.recurrent import Recurrent, RecurrentConfig, RecurrentEncoder
from annotated_transformer.v1.training import Objective, TrainConfig, train_step
from annotated_transformer.v1.transformer import Transformer, TransformerConfig, count_parameters
from annotated_transformer.v1.vocabulary import BOS, EOS, PAD

KINDS = ('additive', 'dot')
SIZES = dict(vocab_size=30, n_layers=2, d_model=16)


def new(attention='additive', seed=0, **changes):
    "A small model in 64 bits, with logits that differ enough for hypotheses to overtake one another."
    torch.manual_seed(seed)
    model = Recurrent(RecurrentConfig(attention=attention, **SIZES | changes)).double().eval()
    with torch.no_grad(): model.output.weight.mul_(3)
    return model

def sources(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return pad_rows([torch.randint(4, 30, (n - 1,), generator=generator).tolist() for n in lengths], last=EOS)


# --- settings

@pytest.mark.parametrize('field, value, words', [
    ('d_model', 7, 'd_model=7 is odd'), ('d_model', 0, 'positive whole number'),
    ('max_len', -1, 'max_len=-1'), ('dropout', 1.0, 'below 1')])
def test_settings_that_cannot_be_are_refused(field, value, words):
    with pytest.raises(ValueError, match=words): RecurrentConfig(**{field: value})

@pytest.mark.parametrize('n_layers', (1, 3))
@pytest.mark.parametrize('tied', (True, False))
def test_any_number_of_layers_tied_or_not(n_layers, tied):
    model = new(n_layers=n_layers, tied=tied)
    assert ((model.src_embed.weight is model.output.weight) == tied
            and model(sources(5, 3), sources(4, 4)).shape == (2, 4, 30))
    assert count_parameters(model) - count_parameters(new(n_layers=n_layers)) == (0 if tied else 2 * 30 * 16)


# --- the state that a search moves about

@pytest.mark.parametrize('attention', KINDS)
@pytest.mark.parametrize('seed', range(3))
def test_whatever_is_moved_each_hypothesis_goes_on_from_its_own_words(attention, seed):
    "Random words, parents and sentences that stay, at every step compared with the whole prefix read anew."
    model, src, draw = new(attention), sources(7, 3, 5, 1), torch.Generator().manual_seed(seed)
    state, prefixes = model.decoding_state(src), [[[]] for _ in src]
    assert isinstance(state, DecodingState)
    last = torch.full((4, 1), BOS)
    with torch.inference_mode():
        for _ in range(7):
            for line in range(len(prefixes)):
                for j, words in enumerate(prefixes[line]): words.append(last[line, j].item())
            logits = state.logits(last)
            for line, hypotheses in enumerate(prefixes):
                whole = model(src[[line]*len(hypotheses)], torch.tensor(hypotheses))[:, -1]
                assert_close(logits[line], whole, rtol=0, atol=1e-12)
            parents = torch.randint(
                last.size(1), (len(prefixes), 1 + torch.randint(4, (), generator=draw).item()), generator=draw)
            state.follow(parents)
            prefixes = [[list(hypotheses[p]) for p in row] for hypotheses, row in zip(prefixes, parents.tolist())]
            if len(prefixes) > 1 and torch.rand((), generator=draw) < 0.4:
                lines = torch.randperm(len(prefixes), generator=draw)[:-1]
                state.keep(lines)
                prefixes, src, parents = [prefixes[i] for i in lines.tolist()], src[lines], parents[lines]
            last = torch.randint(4, 30, parents.shape, generator=draw)

@pytest.mark.parametrize('attention', KINDS)
def test_a_search_says_of_its_translations_what_teacher_forcing_says(attention):
    model, src, ended = new(attention, tied=False), sources(9, 2, 6, 4), 0
    for likely in 3., -3.: # the end, so that short translations win; then it is not, and they are cut off
        with torch.no_grad():
            usual = model.states(src, sources(5, 5, 5, 5, seed=1)).flatten(0, 1).mean(0)
            model.output.weight[EOS] = likely * usual / usual.norm()**2
        for row, hypotheses in zip(src, beam_search(model, src, beam_size=5, n_best=5, max_extra=8)):
            assert len(hypotheses) == 5
            for h in hypotheses:
                cut = len(h.ids) == int((row != PAD).sum()) + 8
                words = torch.tensor([[BOS, *h.ids, EOS]])[:, :len(h.ids) + 2 - cut]
                log_probs = model(row[None], words[:, :-1])
                log_probs[..., :EOS] = -torch.inf
                said = log_probs.log_softmax(-1).gather(-1, words[:, 1:, None]).sum()
                assert_close(torch.tensor(h.log_prob).double(), said, rtol=0, atol=1e-5)
                if not cut:
                    assert_close(score_translations(model, row[None], [h.ids])[0].double(), said,
                                 rtol=0, atol=1e-5)
                ended += not cut
    assert 6 < ended < 34, 'too much of one kind'
    for a, b in zip(greedy(model, src, max_extra=9), beam_search(model, src, beam_size=1, max_extra=9)):
        assert a.ids == b[0].ids
    drawn = sample(model, src, generator=torch.Generator().manual_seed(1), max_extra=9)
    assert len({tuple(h.ids) for h in drawn}) > 1

@pytest.mark.parametrize('attention', KINDS)
def test_neither_company_nor_order_nor_padding_matter(attention):
    model, src, order = new(attention), sources(9, 2, 6, 4), torch.tensor([2, 0, 3, 1])
    base = beam_search(model, src, beam_size=3, max_extra=8)
    shuffled, padded = (beam_search(model, src[order], beam_size=3, max_extra=8),
                        beam_search(model, torch.nn.functional.pad(src, (0, 4)), beam_size=3, max_extra=8))
    for i in range(4):
        [alone] = beam_search(model, src[i:i+1, :(src[i] != PAD).sum()], beam_size=3, max_extra=8)
        for other in alone, shuffled[order.tolist().index(i)], padded[i]:
            assert other[0].ids == base[i][0].ids
            assert_close(other[0].log_prob, base[i][0].log_prob, rtol=0, atol=1e-5)

def test_the_caches_of_a_search_are_not_the_models():
    "Two searches at once do not meet, and a search leaves nothing behind."
    model, src = new(), sources(5, 4)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    one, two = model.decoding_state(src), model.decoding_state(src)
    with torch.inference_mode():
        first = one.logits(torch.full((2, 1), BOS)).clone()
        one.logits(torch.full((2, 1), 9))
        assert_close(two.logits(torch.full((2, 1), BOS)), first, rtol=0, atol=0)
    assert (before.keys() == model.state_dict().keys()
            and all(torch.equal(x, before[name]) for name, x in model.state_dict().items()))

def test_sources_of_nothing_and_batches_of_nobody():
    model = new()
    logits = model(torch.tensor([[PAD, PAD], [7, EOS]]), torch.tensor([[BOS, 5], [BOS, 5]]))
    assert logits.isfinite().all()
    assert_close(logits[1:], model(torch.tensor([[7, EOS]]), torch.tensor([[BOS, 5]])))
    assert beam_search(model, torch.zeros(0, 4, dtype=torch.long)) == []
    assert model(torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3, 30)
    hidden = model.states(torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long))
    model.output(hidden).sum().backward() # a share of nobody has gradients of zero, not none (page 41)
    assert all((p.grad == 0).all() for p in model.parameters())
    assert score_translations(model, torch.zeros(0, 4, dtype=torch.long), []).shape == (0,)

def test_weights_are_shares_of_the_source_and_never_of_padding():
    model, src, tgt = new(), sources(7, 3), sources(5, 5)
    weights = model.look(src, tgt)[1]
    assert weights.shape == (2, 5, 7)
    assert_close(weights.sum(-1), torch.ones(2, 5).double())
    assert weights[1, :, 3:].abs().max() == 0
    encoder, decoder, cross = model.attention_maps(src[:1], tgt[:1])
    assert encoder is decoder is None
    assert_close(cross, weights[:1, None], rtol=0, atol=1e-12)


# --- training

@pytest.mark.parametrize('attention', KINDS)
def test_the_checks_of_page_33_hold(attention):
    torch.manual_seed(0)
    model = Recurrent(RecurrentConfig(30, 2, 32, attention, dropout=0.1))
    report = check_transformer(model, make=lambda: Recurrent(model.config)).raise_if_failed()
    # it has no positions, and packing asks how long sentences are
    assert report.skipped == ['without positions', 'device'], report

def test_a_planted_leak_is_caught():
    class Careless(RecurrentEncoder):
        "Reads padding as if it were words."
        def forward(self, x, lengths): return super().forward(x, torch.full_like(lengths, x.size(1)))
    model = new()
    model.encoder.__class__ = Careless
    assert check_transformer(model, only=['source padding', 'future']).failed == ['source padding']

@pytest.mark.parametrize('changes', [dict(), dict(r_drop=1.0), dict(precision='bfloat16')], ids=str)
def test_it_learns_under_every_objective(changes):
    torch.manual_seed(0)
    model = Recurrent(RecurrentConfig(**SIZES | dict(dropout=0.1)))
    objective, optimizer = Objective(model, TrainConfig(label_smoothing=0.0, **changes)), make_optimizer(model)
    batch = Batch(sources(5, 3, 4), torch.cat([torch.full((3, 1), BOS), sources(4, 6, 2, seed=1)], 1))
    losses = [train_step(objective, [batch], optimizer, 1e-2) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


# --- folders and commands

@pytest.mark.parametrize('attention', KINDS)
def test_a_folder_gives_back_the_same_model(tmp_path, attention):
    model = new(attention).float()
    save_model(model, tmp_path)
    told = json.loads((tmp_path/'config.json').read_text())
    assert told['kind'] == 'recurrent' and read_config(told) == model.config
    twin, pair = load_model(tmp_path), (sources(5, 3), sources(4, 4))
    assert type(twin) is Recurrent and not twin.training and twin.output.weight is twin.tgt_embed.weight
    assert_close(twin(*pair), model(*pair), rtol=0, atol=0)

@pytest.mark.parametrize('text, words', [
    ('{"kind": "convolutional"}', 'kind'), ('{"kind": "recurrent", "n_heads": 4}', 'n_heads'),
    ('[]', 'no configuration'), ('7', 'no configuration'), ('{"kind": ["recurrent"]}', 'no configuration')])
def test_settings_of_no_model_are_told(tmp_path, text, words):
    save_model(new(), tmp_path)
    (tmp_path/'config.json').write_text(text)
    with pytest.raises(ValueError, match='is no configuration') as told: load_model(tmp_path)
    assert words in str(told.value)

def test_each_kind_of_settings_builds_its_own_model(tmp_path):
    transformer = TransformerConfig(30, n_layers=1, d_model=16, d_ff=16, n_heads=2)
    assert type(build(transformer)) is Transformer and type(build(RecurrentConfig(**SIZES))) is Recurrent
    save_model(build(transformer), tmp_path)
    assert 'kind' not in json.loads((tmp_path/'config.json').read_text()) and type(load_model(tmp_path)) is Transformer

@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "A recurrent translator, trained for some steps by the recipe, and its folder."
    folder = tmp_path_factory.mktemp('recurrent')/'run'
    lines = ''.join(f'{i} {i*i % 17} {i % 7} {i % 5}\n' for i in range(120))
    for side in ('src', 'tgt'): (folder.parent/side).write_text(lines)
    base = default_run(CorpusConfig('files', 'en-de', src=folder.parent/'src', tgt=folder.parent/'tgt',
                                    held_out=12), recipe='copy')
    config = replace(base, model=RecurrentConfig(200, 1, 24, 'dot', max_len=24),
                     training=replace(base.training, max_epochs=None, max_steps=12, warmup=4, save_every=4,
                                      average=2, log_every=4))
    return train_translator(config, folder, progress_bar=False), folder, config

def test_the_recipe_trains_it_and_goes_on_where_it_was(run):
    translator, folder, config = run
    assert type(translator.model) is Recurrent and translator.training['progress']['step'] == 12
    assert translator.training['run']['model']['kind'] == 'recurrent'
    again = train_translator(config, folder, progress_bar=False)                             # finished: it is read
    assert type(again.model) is Recurrent
    with pytest.raises(ValueError, match='model.attention is .dot. there and .additive. here'):
        train_translator(replace(config, model=replace(config.model, attention='additive')), folder, progress_bar=False)

def test_settings_of_no_class_are_refused():
    with pytest.raises(ValueError, match='dict is no class of settings: '
                                         'choose TransformerConfig or RecurrentConfig'):
        build(dict())

def test_the_commands_take_its_folder(run, capsys):
    _, folder, _ = run
    main(['evaluate', '--model', str(folder), '--split', 'val', '--samples', '0', '--json'])
    told = json.loads(capsys.readouterr().out)
    assert told['sentences'] == 12 and 1 < told['perplexity'] < 100
    main(['translate', '--model', str(folder), '--n-best', '2', '16 9 6'])
    assert len(capsys.readouterr().out.splitlines()) == 2
    main(['average', str(folder), '--n', '2'])
    assert type(load_model(folder/'averaged-last-2')) is Recurrent
    main(['attention', '--model', str(folder), '--text', '16 9 6', '--out', str(folder.parent/'page.html')])
    assert '16 9 6' in (folder.parent/'page.html').read_text('utf-8')

def test_its_maps_are_those_of_the_source_alone(run):
    translator, *_ = run
    maps = translator.attention('16 9 6', '9 6 16 11')
    assert (maps.encoder is maps.decoder is None
            and maps.cross.shape == (1, 1, len(maps.tgt), len(maps.src)) == (1, 1, 5, 4))
    assert_close(maps.cross.sum(-1), torch.ones(1, 1, 5))

def test_its_scores_are_those_of_its_search(run):
    translator, *_ = run
    texts = ['16 9 6', '4 5 6 7 8 9 10', '11']
    found = translator.translate_n_best(texts, n_best=3, beam_size=3, max_extra=60)
    for text, ways in zip(texts, found):
        assert len({way.text for way in ways}) > 1
        for way in ways:
            if len(way.text.split()) < 50:
                assert_close(translator.score(text, way.text), way.log_prob, rtol=1e-4, atol=1e-4)

def test_average_of_checkpoints(run, tmp_path):
    _, folder, _ = run
    steps = sorted((folder/'checkpoints').iterdir())[-2:]
    average_checkpoints(steps, tmp_path/'mean')
    mean, (one, two) = load_model(tmp_path/'mean'), map(load_model, steps)
    assert_close(mean.join.weight, (one.join.weight + two.join.weight)/2)


@pytest.mark.parametrize('to', ['ctranslate2', 'marian'])
def test_others_have_transformers_only(run, tmp_path, capsys, to):
    with pytest.raises(SystemExit): main(['export', str(run[1]), '--to', to, '--out', str(tmp_path/to)])
    assert 'made from a RecurrentConfig' in capsys.readouterr().err and not (tmp_path/to).exists()
