"COMET is called as its library documents, on a model that is on disk; what is missing is named before any work is done."
import json
import sys
import types
from importlib.machinery import ModuleSpec

import pytest

from annotated_transformer.cli import main
from annotated_transformer.comet_score import check_comet, comet_scores
from annotated_transformer.translator import Translator

OURS = ['Ein Hund.', 'Eine Katze.', 'Ein Hund schläft.']
REFERENCES = ['Ein Hund.', 'Ein Kater.', 'Der Hund schläft.']
SOURCES = ['A dog.', 'A cat.', 'The dog sleeps.']


@pytest.fixture
def model(tmp_path):
    "The files of a COMET model, without content."
    folder = tmp_path / 'tiny-comet'
    (folder / 'checkpoints').mkdir(parents=True)
    (folder / 'checkpoints' / 'model.ckpt').touch()
    (folder / 'hparams.yaml').touch()
    return folder


@pytest.fixture
def calls(monkeypatch):
    "A stand-in for the module `comet`, with the signatures of unbabel-comet 2.2.7: what it was called with."
    calls = []

    class Model:
        def predict(self, samples, batch_size=16, gpus=1, devices=None, mc_dropout=0, progress_bar=True,
                    accelerator='auto', num_workers=None, length_batching=True):
            calls.append({'samples': samples, 'gpus': gpus, 'progress_bar': progress_bar})
            scores = [float(sample['mt'] == sample['ref']) for sample in samples]
            return types.SimpleNamespace(scores=scores, system_score=sum(scores) / len(scores))

    def load_from_checkpoint(checkpoint_path, reload_hparams=False, strict=False, local_files_only=False):
        calls.append({'path': checkpoint_path, 'local_files_only': local_files_only})
        return Model()

    module = types.ModuleType('comet')
    module.__spec__ = ModuleSpec('comet', None)
    module.__version__ = '2.2.7'
    module.load_from_checkpoint = load_from_checkpoint
    monkeypatch.setitem(sys.modules, 'comet', module)
    return calls


@pytest.fixture
def files(tmp_path):
    "Options of `evaluate` for three files of three lines."
    options = []
    for name, lines in {'translations': OURS, 'references': REFERENCES, 'src': SOURCES}.items():
        (tmp_path / name).write_text(''.join(f'{line}\n' for line in lines), encoding='utf-8')
        options += [f'--{name}', str(tmp_path / name)]
    return options


def fails(capsys, *options):
    with pytest.raises(SystemExit) as error:
        main(['evaluate', *map(str, options)])
    assert error.value.code == 2
    return capsys.readouterr().err


def test_scores_are_in_the_order_of_the_sentences(model, calls):
    assert comet_scores(model, SOURCES, OURS, REFERENCES, 'cpu') == [1, 0, 0]
    loaded, predicted = calls
    assert loaded == {'path': str(model / 'checkpoints' / 'model.ckpt'), 'local_files_only': True}
    assert predicted['samples'][1] == {'src': 'A cat.', 'mt': 'Eine Katze.', 'ref': 'Ein Kater.'}
    assert predicted['gpus'] == 0
    comet_scores(model, SOURCES, OURS, REFERENCES, 'cuda:0')
    assert calls[-1]['gpus'] == 1
    with pytest.raises(ValueError, match='3 sources, 2 translations and 3 references'):
        comet_scores(model, SOURCES, OURS[:2], REFERENCES)


def test_without_the_library_its_extra_is_named(model, monkeypatch, capsys, files):
    monkeypatch.setitem(sys.modules, 'comet', None) # as if it were not installed
    with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[comet\]'"):
        check_comet(model)
    assert 'COMET is not installed' in fails(capsys, *files, '--comet', model)


def test_a_folder_without_a_model_is_named_before_anything_is_translated(model, calls, monkeypatch, capsys):
    monkeypatch.setattr(Translator, 'translate', lambda *args, **options: pytest.fail('it translated first'))
    (model / 'checkpoints' / 'model.ckpt').unlink()
    message = fails(capsys, '--comet', model)
    assert f'there is no COMET model at {model}: checkpoints/model.ckpt missing' in message
    assert not calls


def test_an_encoder_that_is_not_on_disk_is_explained(model, calls, monkeypatch):
    def load_from_checkpoint(checkpoint_path, **options):
        raise OSError('could not find xlm-roberta-large in the cached files')
    monkeypatch.setattr(sys.modules['comet'], 'load_from_checkpoint', load_from_checkpoint)
    with pytest.raises(OSError, match='must be in the cache of Hugging Face.*xlm-roberta-large'):
        comet_scores(model, SOURCES, OURS, REFERENCES)


def test_evaluate_scores_any_translations(model, calls, capsys, files):
    main(['evaluate', *files, '--samples', '0', '--comet', str(model)])
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == '  COMET 0.3333 (tiny-comet, unbabel-comet 2.2.7)'
    assert [sample['src'] for sample in calls[-1]['samples']] == SOURCES
    main(['evaluate', *files, '--samples', '0', '--comet', str(model), '--json'])
    found = json.loads(capsys.readouterr().out)
    assert found['comet'] == pytest.approx(1 / 3) and found['comet_signature'] == 'tiny-comet, unbabel-comet 2.2.7'
    assert not calls[-1]['progress_bar']


def test_evaluate_scores_a_model(model, calls, capsys, tmp_path):
    table = tmp_path / 'my.tsv'
    table.write_text('The cat sleeps.\tDie Katze schläft.\n' * 2, encoding='utf-8')
    main(['evaluate', '--tsv', str(table), '--samples', '0', '--comet', str(model)])
    assert '  COMET 1.0000 (' in capsys.readouterr().out
    assert calls[-1]['samples'] == [{'src': 'The cat sleeps.', 'mt': 'Die Katze schläft.', 'ref': 'Die Katze schläft.'}] * 2


def test_sources_of_translations_are_for_comet_and_complete(model, calls, capsys, files, tmp_path):
    assert 'leave the options for these out' in fails(capsys, *files)
    assert 'add --src' in fails(capsys, *files[:4], '--comet', model)
    (tmp_path / 'src').write_text('A dog.\n')
    assert 'src has 1 line, but there are 3 references' in fails(capsys, *files, '--comet', model)
    assert not calls
