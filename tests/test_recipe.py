"A run from the name of a corpus to a model folder: settings, parts, resuming, samples, refusals."
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from annotated_transformer.checkpoints import average_checkpoints, list_checkpoints, read_log
from annotated_transformer.corpora import CorpusConfig
from annotated_transformer.recipe import (
    RECIPES, Evaluation, RunConfig, default_run, evaluate, model_config, recipe_for, train_translator)
from annotated_transformer.run_folder import lock_folder
from annotated_transformer.scoring import score
from annotated_transformer.trainer import TrainConfig
from annotated_transformer.transformer import TransformerConfig

WORDS = {'big': 'groß', 'cat': 'Katze', 'cold': 'kalt', 'dog': 'Hund', 'house': 'Haus', 'is': 'ist', 'old': 'alt',
         'red': 'rot', 'the': 'das', 'tree': 'Baum'}


@pytest.fixture(scope='module')
def table(tmp_path_factory):
    "300 pairs of one to six words."
    path = tmp_path_factory.mktemp('data') / 'pairs.tsv'
    generator = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(300):
        n = int(torch.randint(1, 7, (), generator=generator))
        words = [list(WORDS)[i] for i in torch.randint(0, 10, (n,), generator=generator).tolist()]
        lines.append(' '.join(words) + '\t' + ' '.join(WORDS[word] for word in words) + '\n')
    path.write_text(''.join(lines), encoding='utf-8')
    return path


def make_run(table, **changes):
    corpus = CorpusConfig('tsv', tsv=table, held_out=20)
    model = TransformerConfig(vocab_size=60, n_layers=1, d_model=16, d_ff=24, n_heads=2, max_len=16)
    settings = {'max_tokens': 256, 'warmup_steps': 5, 'peak_lr': 1e-2, 'max_steps': 10, 'save_every': 5, 'log_every': 5}
    return RunConfig(corpus, model, TrainConfig(**settings | changes), 'words')


@pytest.fixture(scope='module')
def finished(table, tmp_path_factory):
    "A run that has finished: (configuration, folder, translator)."
    out = tmp_path_factory.mktemp('runs') / 'run'
    config = make_run(table)
    return config, out, train_translator(config, out, progress_bar=False)


def test_a_run_makes_a_model_folder(finished):
    config, out, translator = finished
    names = {path.name for path in out.iterdir()}
    assert names == {'run.json', 'log.jsonl', 'clock.jsonl', 'samples.jsonl', 'config.json', 'model.safetensors',
                     'tokenizer.json', 'training.json', 'README.md', 'checkpoints'}
    training = json.loads((out / 'training.json').read_text())
    assert training['progress']['step'] == 10 and training['val']['sentences'] == 20
    assert training['run']['training']['peak_lr'] == 1e-2


def test_samples_of_three_sentences_at_each_validation(finished):
    _, out, _ = finished
    rows = read_log(out / 'samples.jsonl')
    assert [row['step'] for row in rows] == [5, 5, 5, 10, 10, 10]
    assert [row['source'] for row in rows[:3]] == [row['source'] for row in rows[3:]]
    assert all(row['translation'] != row['source'] for row in rows)


def test_a_finished_run_is_loaded_and_not_trained(finished, monkeypatch):
    config, out, translator = finished
    monkeypatch.setattr('annotated_transformer.recipe.Trainer', None)
    assert train_translator(config, out, progress_bar=False).training == translator.training


def test_a_higher_limit_continues(finished, tmp_path):
    config, _, _ = finished
    parts = tmp_path / 'parts'
    train_translator(replace(config, training=replace(config.training, max_steps=7)), parts, progress_bar=False)
    resumed = train_translator(config, parts, progress_bar=False)
    for a, b in zip(resumed.model.parameters(), finished[2].model.parameters()):
        assert torch.equal(a, b)


def test_a_locked_folder_is_refused_even_to_overwrite(finished):
    config, out, _ = finished
    with lock_folder(out), pytest.raises(ValueError, match='is in use by process'):
        train_translator(config, out, overwrite=True, progress_bar=False)
    assert (out / 'model.safetensors').is_file()


def test_checkpoints_of_a_run_in_progress_are_not_averaged(finished, tmp_path):
    _, out, _ = finished
    with lock_folder(out), pytest.raises(ValueError, match='is in use by process'):
        average_checkpoints(list_checkpoints(out), tmp_path / 'mean')
    average_checkpoints(list_checkpoints(out), tmp_path / 'mean')
    assert (tmp_path / 'mean' / 'model.safetensors').is_file()


def test_nothing_is_left_of_a_run_that_cannot_start(table, tmp_path):
    config = replace(make_run(table), corpus=CorpusConfig('tsv', tsv=tmp_path / 'absent.tsv'))
    with pytest.raises(OSError):
        train_translator(config, tmp_path / 'run', progress_bar=False)
    assert not (tmp_path / 'run').exists()


def test_starting_from_a_trained_model(finished, tmp_path):
    config, out, translator = finished
    settings = replace(config, start_from=out, training=replace(config.training, max_steps=1, peak_lr=1e-9))
    tuned = train_translator(settings, tmp_path / 'tuned', progress_bar=False)
    for a, b in zip(tuned.model.parameters(), translator.model.parameters()):
        assert torch.allclose(a, b, atol=1e-6)
    with pytest.raises(ValueError, match='holds another model'):
        other = replace(settings, model=replace(config.model, d_ff=32))
        train_translator(other, tmp_path / 'other', progress_bar=False)
    with pytest.raises(ValueError, match='which it starts from'):
        train_translator(settings, out, progress_bar=False)


def test_final_evaluation_is_expected_from_the_samples(finished):
    _, _, translator = finished
    pairs = [('the dog', 'das Hund')] * 32
    evaluation = Evaluation(pairs, translator.tokenizer, {})
    rows = evaluation.samples(translator.model)
    assert len(rows) == 3 and rows[0]['reference'] == 'das Hund'
    assert evaluation.expected_seconds > 0
    assert evaluation.bleu(translator.model) == {}


# point 10 of the trial of 0.1.0
def test_the_time_left_of_a_run_includes_its_evaluation_which_says_what_it_does(table, tmp_path, capsys):
    logs = []
    train_translator(make_run(table), tmp_path / 'run', on_start=lambda trainer, *_: logs.append(trainer.log))
    assert logs[0].seconds_after_training > 0 # from the samples
    printed = capsys.readouterr().err
    assert printed.index('step 10') < printed.index('scoring the validation set')


def test_help_says_that_scoring_takes_more_than_the_minutes_of_training():
    from annotated_transformer.command_options import field_texts
    assert 'final scoring' in field_texts(TrainConfig)['max_minutes']


def test_evaluation_translates_and_scores(finished):
    _, _, translator = finished
    pairs = [('the dog is old', 'das Hund ist alt'), ('red tree', 'rot Baum')]
    scores, translations = evaluate(translator, pairs, beam_size=1)
    assert translations == translator.translate([src for src, _ in pairs], beam_size=1)
    assert math.isclose(scores.bleu, score(translations, [tgt for _, tgt in pairs]).bleu)


@pytest.mark.parametrize('name', RECIPES)
def test_every_recipe_is_valid(name):
    run = default_run(recipe=name)
    assert recipe_for(run.corpus.corpus) in RECIPES
    assert RECIPES[recipe_for(run.corpus.corpus)]['preset'] == RECIPES[name]['preset']


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match='recipe=.*choose one of copy'):
        default_run(recipe='multi40k')
    with pytest.raises(ValueError, match='preset=.*choose one of'):
        model_config('huge')


@pytest.mark.parametrize('changes, message', [
    ({'tokenizer': 'sentencepiece'}, 'set start_from'), ({'bpe_dropout': 1.0}, 'below 1'),
    ({'bpe_dropout': 0.1}, 'needs tokenizer=bpe'), ({'freeze_vectors': True}, 'needs vectors'),
    ({'val_sentences': -1}, 'val_sentences=-1'), ({'start_from': 'a', 'vectors': 'b'}, 'its own embeddings')])
def test_settings_that_do_not_go_together(table, changes, message):
    changes = {name: Path(value) if name in ('start_from', 'vectors') else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        replace(make_run(table), **changes)
