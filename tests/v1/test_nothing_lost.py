"What a slip of the user must not cost: a trained model, a run, translations; and streams and devices as output."
import json, os, shutil, sys, threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from annotated_transformer.v1 import cli
from annotated_transformer.v1.checkpoints import origin, whole
from annotated_transformer.v1.corpora import CorpusConfig
from annotated_transformer.v1.recipe import RunConfig, claim, default_run, open_run, settings
from annotated_transformer.v1.training import TrainConfig
from annotated_transformer.v1.transformer import TransformerConfig
from annotated_transformer.v1.translator import SHIPPED, Account, Translator
from annotated_transformer.v1.visualize import Explorer
from annotated_transformer.v1.vocabulary import spacy_splitter, write_whole

def held(folder): return {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}

@pytest.fixture
def trained(tmp_path):
    "A finished run's folder, as of the package's model."
    folder = shutil.copytree(SHIPPED, tmp_path / 'trained')
    (folder / 'run.json').write_text(json.dumps(settings(default_run())))
    return folder

@pytest.mark.parametrize('overwrite', [False, True])
@pytest.mark.parametrize('inside', ['', 'checkpoints/step-00000009'])
def test_a_run_does_not_write_over_the_model_it_starts_from(trained, overwrite, inside):
    shutil.copytree(SHIPPED, trained / inside, dirs_exist_ok=True)
    before = held(trained)
    with pytest.raises(ValueError, match='which it starts from: choose another --out'):
        open_run(default_run(start_from=trained / inside), trained, overwrite)
    assert held(trained) == before

def own_text(tmp_path, **paths):
    for name in 'src', 'tgt', 'val_tgt': (tmp_path / name).write_text('a b c\nd e\n' * 20)
    corpus = CorpusConfig('files', **{name: tmp_path / name for name in ('src', 'tgt', 'val_tgt')} | paths)
    model = TransformerConfig(vocab_size=40, n_layers=1, d_model=8, d_ff=8, n_heads=2)
    return RunConfig(corpus, model, TrainConfig(max_steps=1), 'words')

@pytest.mark.parametrize('slip', ['val_src', 'vectors'])
def test_a_slip_leaves_the_old_run_and_no_new_folder(tmp_path, trained, slip):
    missing, before = tmp_path / 'typo', held(trained)
    config = own_text(tmp_path, val_src=missing if slip == 'val_src' else tmp_path / 'src')
    if slip == 'vectors': config = replace(config, vectors=missing)
    for folder, overwrite in (trained, True), (tmp_path / 'new', False):
        with pytest.raises(OSError, match='typo'): open_run(config, folder, overwrite)
    assert held(trained) == before and not (tmp_path / 'new').exists()

@pytest.mark.parametrize('changes, said', [
    (dict(max_tokens=3), 'more than max_tokens=3'), (dict(tensorboard=True), 'tensorboard is not installed')], ids=str)
def test_settings_that_cannot_be_trained_with_leave_all_as_it_was(tmp_path, trained, changes, said, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    before, config = held(trained), own_text(tmp_path, val_src=tmp_path / 'src')
    config = replace(config, training=replace(config.training, **changes))
    for folder, overwrite in (trained, True), (tmp_path / 'new', False):
        with pytest.raises(ValueError, match=said): open_run(config, folder, overwrite)
    assert held(trained) == before and not (tmp_path / 'new').exists()

def test_checkpoints_that_lie_elsewhere_stay_there(tmp_path, trained):
    (scratch := tmp_path / 'scratch').mkdir()
    (scratch / 'step-00000001').mkdir()
    (trained / 'checkpoints').symlink_to(scratch)
    claim(trained, default_run(preset='tiny'), overwrite=True)
    assert [p.name for p in scratch.iterdir()] == ['step-00000001'] and not (trained / 'checkpoints').exists()
    assert [p.name for p in trained.iterdir()] == ['run.json']

def test_what_is_compared_with_is_not_written_over(tmp_path, capsys):
    for name in 'ours', 'refs': (tmp_path / name).write_text(f'{name} .\n')
    flags = ['--translations', str(tmp_path / 'ours'), '--references', str(tmp_path / 'refs')]
    for output in tmp_path / 'refs', tmp_path / '..' / tmp_path.name / 'ours':
        with pytest.raises(SystemExit): cli.main(['evaluate', *flags, '--output', str(output)])
        assert 'is read, and would be written over' in capsys.readouterr().err
    assert (tmp_path / 'refs').read_text() == 'refs .\n'

def test_a_folder_that_stepped_aside_by_hand_stays(tmp_path):
    (tmp_path / 'served.old').mkdir()
    with whole(tmp_path / 'served') as folder: (folder / 'a').write_text('')
    assert sorted(p.name for p in tmp_path.iterdir()) == ['served', 'served.old']
    with whole(tmp_path / 'served') as folder: (folder / 'b').write_text('')  # one of ours stepped aside in between
    assert [p.name for p in (tmp_path / 'served').iterdir()] == ['b']

def test_a_finished_run_without_checkpoints_does_not_begin_again_in_silence(trained):
    before, run = held(trained), default_run()
    longer = replace(run, training=replace(run.training, max_epochs=99))
    with pytest.raises(ValueError, match='finished run without its checkpoints'): claim(trained, longer)
    assert held(trained) == before
    (trained / 'checkpoints/step-00000100').mkdir(parents=True)
    claim(trained, longer)

def test_the_last_checkpoints_are_those_of_the_plan(tmp_path):
    (tmp_path / 'run.json').write_text(json.dumps(dict(training=dict(save_every=100))))
    rows = [dict(step=step, val_loss=1.) for step in (100, 200, 300, 350, 400, 450)]
    average = cli.Average(tmp_path, n=3)
    assert average.last_steps(rows) == [300, 400, 450]                 # 350 was a stop on the way, 450 is the end

def test_how_a_model_is_searched_stays_with_it(trained):
    about = json.loads((trained / 'training.json').read_text())
    (trained / 'training.json').write_text(json.dumps(about | dict(decoding=dict(alpha=1.))))
    assert origin(trained)['decoding'] == dict(alpha=1.)

@pytest.mark.parametrize('line', ['ab c\n', 'ab c\r\n', b'ab c\n', b'ab c\r\n', 'ab c', b'ab c'])
def test_the_end_of_a_line_is_no_text(line): assert Account(9).text(line) == 'ab c'

def test_a_mark_before_a_line_is_no_text():
    account = Account(9)
    assert [account.text(line) for line in ('\ufeffab', b'\xef\xbb\xbfab')] == ['ab', 'ab']

def test_other_encodings_are_told():
    account = Account(9)
    assert [account.text(line) for line in ('ein Hund\n' * 2).encode('utf-16-le').splitlines()] == ['', '', '']
    assert (account.bad, account.first) == (3, 'line 1: a NUL character: is it UTF-8?')

@pytest.mark.parametrize('write', [write_whole, lambda path, text: SimpleNamespace(
    html=lambda: text, save=lambda path: Explorer.save(SimpleNamespace(html=lambda: text), path)).save(path)],
    ids=['write_whole', 'Explorer.save'])
def test_a_pipe_is_written_to_as_it_is(tmp_path, write):
    reader, writer = os.pipe()
    write(f'/dev/fd/{writer}', 'some text')
    os.close(writer)
    with open(reader) as file: assert file.read() == 'some text'
    os.mkfifo(tmp_path / 'pipe')
    read = []
    thread = threading.Thread(target=lambda: read.append((tmp_path / 'pipe').read_text()))
    thread.start()
    write(tmp_path / 'pipe', 'more')
    thread.join(10)
    assert read == ['more'] and (tmp_path / 'pipe').is_fifo()

@pytest.mark.parametrize('slip', [('--against', 'typo'), ('--tokenized-references', 'typo'), ('--samples', '20')])
def test_evaluate_looks_at_its_input_before_it_translates(monkeypatch, capsys, slip):
    def never(*_, **__): raise AssertionError('it translated first')
    monkeypatch.setattr(Translator, 'translate', never)
    with pytest.raises(SystemExit) as stop: cli.main(['evaluate', '--corpus', 'toy-ende', *slip])
    assert stop.value.code == 2 and slip[1] in capsys.readouterr().err

@pytest.mark.parametrize('error, told', [(MemoryError(), True), (RuntimeError("can't allocate memory: 9 bytes"), True),
                                         (RuntimeError('a bug'), False)], ids=['MemoryError', 'torch', 'a bug'])
def test_too_little_memory_is_told_in_one_line(monkeypatch, capsys, error, told):
    def parsed(args):
        def command(): raise error
        return command
    monkeypatch.setattr(cli, 'parse', parsed)
    with pytest.raises(SystemExit if told else RuntimeError): cli.main([])
    assert ('not enough memory' in capsys.readouterr().err) == told

def test_words_that_were_cut_are_forgotten(monkeypatch):
    import spacy
    made, blank = [], spacy.blank
    def noted(lang):
        made.append(blank(lang))
        return made[-1]
    monkeypatch.setattr(spacy, 'blank', noted)
    split = spacy_splitter('en')
    for i in range(0, 110_000, 1000): split(' '.join(f'w{i + j}' for j in range(1000)))
    assert split('two words') == [('two', True), ('words', False)]
    assert len(made) == 2 and len(made[1].vocab) < 50_000
