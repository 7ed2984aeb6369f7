"""The command line as its users meet it: an error is one line with exit code 2, and no file is lost.

A new user tried version 0.1.0 and met thirteen severe or major problems; comments in all test files name the tests of each.
"""
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from annotated_transformer import cli, model_commands, train_command, translate_command
from annotated_transformer.checkpoints import list_checkpoints
from annotated_transformer.cli import COMMANDS, main, parse
from annotated_transformer.command_options import choices_of, metavar, named_as_typed, plain_error
from annotated_transformer.commands import SEARCH, check_sentences
from annotated_transformer.corpora import CORPORA, CorpusConfig, load_corpus
from annotated_transformer.data_checks import likely_mistakes
from annotated_transformer.inference import DecodingConfig
from annotated_transformer.line_translation import END_OF_INPUT, PartialOutput, live_lines
from annotated_transformer.recipe import default_run
from annotated_transformer.relative_positions import RELATIVE_POSITIONS
from annotated_transformer.run_folder import lock_file, lock_folder
from annotated_transformer.run_log import Interrupted
from annotated_transformer.run_reports import changed_settings, chosen_weights, is_still_improving
from annotated_transformer.scoring import score
from annotated_transformer.server import ServerConfig
from annotated_transformer.text_streams import FLUSH
from annotated_transformer.trainer import Trainer
from annotated_transformer.transformer import POSITIONS
from annotated_transformer.translate_command import Translate
from annotated_transformer.translator import SHIPPED, Translator

ROOT = Path(__file__).resolve().parents[1]
SMALL = ('--max-steps 20 --save-every 10 --d-model 32 --d-ff 64 --n-layers 1 --vocab-size 100 --max-tokens 512 '
         '--max-len 40').split()
PAIRS = [(f'the {noun} {verb}s .', f'{noun.upper()} {verb} t !')
         for noun in 'dog cat fox hen cow'.split() for verb in 'run eat sing'.split()] * 4


def write_tsv(path, pairs=PAIRS):
    path.write_text(''.join(f'{src}\t{tgt}\n' for src, tgt in pairs), encoding='utf-8')
    return path


def hashes(folder):
    "Every file below a folder, with a hash of its content."
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob('*') if path.is_file()}


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    "A model trained for a moment on a small table."
    folder = tmp_path_factory.mktemp('trained')
    main(['train', '--tsv', str(write_tsv(folder / 'pairs.tsv')), '--out', str(folder / 'run'), *SMALL])
    return folder / 'run'


@pytest.fixture
def run(capsys):
    "Run a command that must succeed, and return what it prints: standard output, errors."
    def call(*args):
        capsys.readouterr()
        main([str(arg) for arg in args])
        return capsys.readouterr()
    return call


@pytest.fixture
def fails(capsys):
    "Run a command that must fail with exit code 2, and return its only line."
    def call(*args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith('annotated-transformer: ')]
        assert stop.value.code == 2 and len(lines) == 1, lines
        return lines[0]
    return call


def helped(capsys, *args):
    "The help of a command as one line."
    with pytest.raises(SystemExit) as stop:
        main([*args, '--help'])
    assert not stop.value.code
    return re.sub(r'[│\s]+', ' ', capsys.readouterr().out)


# --- help

def test_help_and_version_do_not_import_torch():
    code = ('import sys; from annotated_transformer.cli import main\n'
            'try: main(sys.argv[1:])\n'
            'except SystemExit: print("torch" in sys.modules, "numpy" in sys.modules)')
    for option in ('--help', '--version'):
        done = subprocess.run([sys.executable, '-c', code, option], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.splitlines()[-1] == 'False False', done.stdout + done.stderr
    with pytest.raises(SystemExit):
        parse(('--version',)) # any sequence will do


@pytest.mark.parametrize('command', COMMANDS)
def test_every_option_is_explained_without_python(command, capsys):
    with pytest.raises(SystemExit):
        main([command, '--help'])
    text = capsys.readouterr().out
    assert not re.search(r'None|ValueError|Raises|default: False|page \d|`|--\w+_', text)
    options = re.findall(r'^[│ ]{0,3}(--[a-z][\w-]*) *(?:PATH|INT|NUMBER|TEXT|\{[^}]*\})?(.*(?:\n[│ ]{10,}[^-│ ].*)*)', text, re.M)
    expected = {'--config'} if command in ('prepare', 'download') else {'--config', '--device'} # nothing is computed on a device
    assert expected <= {option for option, _ in options}
    for option, explanation in options:
        words = re.findall('[a-z]{2,}', re.sub(r'\((?:default|required).*', '', explanation, flags=re.S))
        assert len(words) > 1, option


def test_everyday_options_come_first(capsys):
    text = helped(capsys, 'train')
    order = [text.index(name) for name in (
        '--tsv PATH', '--max-minutes NUMBER', 'data options', '--held-out', 'model options', '--n-layers', 'training options',
        '--warmup-steps', 'expert options', '--r-drop ')]
    assert order == sorted(order)


def test_train_offers_what_the_registries_hold():
    for option, names in (('positions', [*POSITIONS, *RELATIVE_POSITIONS]), ('corpus', list(CORPORA))):
        assert list(get_args(train_command.Train.KINDS[option])) == names


# point 12 of the trial of 0.1.0
def test_help_shows_the_defaults_that_apply(capsys, tmp_path):
    assert "dimension of each token's vector (default: 128)" in helped(capsys, 'train')
    assert "dimension of each token's vector (default: 512)" in helped(capsys, 'train', '--preset', 'base')
    assert '(default: runs/multi30k)' in helped(capsys, 'train', '--corpus', 'multi30k')
    assert '(default: runs/tsv)' in helped(capsys, 'train', '--tsv', 'x.tsv')
    assert 'source and target (section 5.1) (default: 4000)' in helped(capsys, 'train', '--tsv', 'x.tsv', '--recipe', 'small')
    shutil.copytree(SHIPPED, tmp_path / 'model')
    record = json.loads((SHIPPED / 'training.json').read_text()) | {'decoding': {'beam_size': 7, 'patience': 2.0}}
    (tmp_path / 'model/training.json').write_text(json.dumps(record))
    text = helped(capsys, 'translate', '--model', str(tmp_path / 'model'))
    assert '(default: 7)' in text and re.search(r'--beam-patience NUMBER [^()]*\([^()]*\) \(default: 2.0\)', text)


# where a command differs from the others: the first takes one file or several; the second is sensible only there
DIFFERENT_KINDS = {('evaluate', 'tsv'), ('evaluate', 'src'), ('evaluate', 'tgt'), ('prepare', 'tokenizer')}


def test_an_option_has_one_meaning_in_all_commands():
    kinds = {}
    for command in COMMANDS:
        for name, option in cli.command_class(command).options({}).items():
            choices = sorted({*choices_of(option.kind)} - {'prepared'}) # `prepare` cannot read what it has written
            kind = (option.is_positional, choices or metavar(option))
            kinds.setdefault(name, []).append((command, kind))
    shared = {name: found for name, found in kinds.items() if len(found) > 1}
    assert {'model', 'out', 'output', 'overwrite', 'pair', 'device', 'text'} <= shared.keys()
    for name, found in shared.items():
        assert len({str(kind) for command, kind in found if (command, name) not in DIFFERENT_KINDS}) == 1, (name, found)
    options = {command: cli.command_class(command).options({}) for command in COMMANDS}
    for command in ('evaluate', 'translate', 'attention', 'serve', 'export'): # which read one model
        assert options[command]['model'].help.startswith("a model's folder")
    for command in ('translate', 'attention'): # which read sentences
        assert options[command]['text'].is_positional
    assert all(('patience' in options[command]) == (command == 'train') for command in COMMANDS)
    assert 'CUDA' in options['train']['device'].help and 'mps' in options['train']['device'].help


def test_an_unknown_command_and_option_are_named(fails):
    assert 'translat is not a command (did you mean translate?): choose one of train' in fails('translat')
    assert 'Example: annotated-transformer translate' in fails('runs/mine')
    assert "--modle is not an option (did you mean --model?)" in fails('translate', '--modle', 'x')
    assert '--beam is not an option (did you mean --beam-size or --beam-patience?)' in fails('translate', '--beam', 'x')
    assert '--zzzz is not an option. Example: ' in fails('translate', '--zzzz', 'x')
    assert 'word belongs to no option: write a value directly behind its option' in fails('evaluate', 'word')
    for theirs, ours in (('--lr', '--peak-lr'), ('--batch-size', '--max-tokens'), ('--epochs', '--max-epochs')):
        assert f'did you mean {ours}?' in fails('train', theirs, 1)
    assert '--beam-size x is not a whole number' in fails('translate', '--beam-size', 'x', 'hello')
    assert '--length-penalty x is not a number' in fails('translate', '--length-penalty', 'x', 'hello')


def test_messages_name_options_as_they_are_typed():
    names = ['max_tokens', 'src', 'max_len']
    message = 'max_tokens=0 must be positive; training.max_tokens was 1; src=a.txt; see src/max_len.txt'
    assert named_as_typed(message, names) == ('--max-tokens 0 must be positive; --max-tokens was 1; --src a.txt; '
                                              'see src/max_len.txt')
    assert plain_error('╭─ Title ─╮\n│ Too\n│ few. │\n╰──╯') == 'Too few.'


@pytest.mark.parametrize('options, words', [
    ('--corpus nope', ["'nope'", 'multi30k']),
    ('--corpus multi30k --pair en-xx', ["'xx'", 'de']),
    ('--preset nope', ['--preset nope', 'tiny', 'base']),
    ('--d-model 0', ['--d-model 0']),
    ('--n-layers -2', ['--n-layers -2']),
    ('--d-model 30 --n-heads 4', ['30', '--n-heads 4']),
    ('--dropout 1.5', ['--dropout 1.5']),
    ('--max-tokens 0', ['--max-tokens 0']),
    ('--norm none', ["'none'", 'post']),
    ('--max-minutes 0', ['--max-minutes 0']),
    ('--r-drop inf', ['--r-drop inf']),
    ('--corpus files', ['--src FILE', '--tgt FILE']),
    ('--corpus tsv', ['--tsv FILE']),
    ('--max-len 1', ['--max-len 1', 'at least 2']),
    ('--device nowhere', ['--device nowhere']),
    ('--threads 0', ['--threads 0']),
    ('--corpus multi30k --data-dir no/such/folder', ['no/such/folder']),
    ('--src missing.txt --tgt missing.txt', ['missing.txt']),
])
def test_settings_that_cannot_work(fails, tmp_path, options, words):
    message = fails('train', '--out', tmp_path / 'run', *options.split())
    assert all(word in message for word in words), message
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('options, message', [
    ('--length-penalty 400', '--length-penalty 400'), ('--batch-tokens 0', '--batch-tokens 0'),
    ('--max-extra-tokens -1', '--max-extra-tokens -1'), ('--beam-patience 0', '--beam-patience 0'),
    ('--buffer-size 0', '--buffer-size 0'), ('--n-best 5', '--n-best 5')])
def test_search_settings_out_of_range(fails, options, message):
    assert message in fails('translate', 'hello', *options.split())


def test_a_missing_model(fails, tmp_path):
    assert 'is not a model folder' in fails('translate', '--model', tmp_path, 'hello')
    (tmp_path / 'training.json').write_text('[]')
    assert 'training.json is damaged: it holds a list' in fails('translate', '--model', tmp_path, 'hello')
    (tmp_path / 'training.json').write_text('{"decoding": {"beam_size": 0}}')
    assert 'training.json: invalid "decoding"' in fails('translate', '--model', tmp_path, 'hello')


# --- configuration files

def test_a_saved_configuration_gives_the_same_command(tmp_path, run, fails):
    path = tmp_path / 'c.json'
    args = ['train', '--tsv', 'x.tsv', '--positions', 'alibi', '--max-ratio', '3', '--norm', 'post']
    with pytest.raises(OSError):
        parse(args)().nothing # the file does not exist, so only the options are compared
    assert 'Next' in run(*args, '--save-config', path).out
    again = parse(['train', '--config', str(path)])
    assert (again.run, again.out) == (parse(args).run, Path('runs/tsv'))
    assert 'exists' in fails(*args, '--save-config', path)
    changed = parse(['train', '--config', str(path), '--dropout', '0.2', '--preset', 'base'])
    assert (changed.run.model.dropout, changed.run.model.d_model, changed.run.model.norm) == (0.2, 512, 'post')


def changed_by(path, stored, typed):
    "The options that typing `typed` changes, beside a file of these options: old and new value, and what is warned of."
    def options(args):
        found = cli.parse_values(['train', '--config', str(path), *args])[1]
        return {name: ' '.join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in found.items()}
    path.write_text(json.dumps(stored))
    before = options([])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        after = options(typed)
    changes = {name: after[name] for name in after if after[name] != before[name]}
    return changes, [str(warning.message) for warning in caught]


OWN = {'d_model': 32, 'n_layers': 1, 'norm': 'post', 'peak_lr': 0.002, 'max_tokens': 512, 'max_steps': 20}


@pytest.mark.parametrize('stored, typed, changes', [
    ({'tsv': 'x.tsv'}, '--preset tiny', {'preset': 'tiny', 'd_model': '128', 'n_layers': '4'}), # also the recipe's preset
    ({'tsv': 'x.tsv'}, '--preset base --d-model 96', {'preset': 'base', 'd_model': '96', 'n_layers': '6', 'd_ff': '2048', 'n_heads': '8'}),
    ({'preset': 'base', 'tsv': 'x.tsv'}, '--max-steps 7', {'max_steps': '7'}),
    ({'tsv': 'x.tsv', 'pair': 'en-fr'}, '--recipe medium',
     {'recipe': 'medium', 'd_model': '128', 'n_layers': '4', 'norm': 'pre', 'peak_lr': '0.004', 'max_tokens': '2048', 'dropout': '0.3',
      'vocab_size': '10000', 'warmup_steps': '400', 'save_every': '250', 'average_checkpoints': '10'}),
    ({'preset': 'base', 'tsv': 'x.tsv'}, '--recipe medium',
     {'recipe': 'medium', 'preset': 'None', 'd_model': '128', 'n_layers': '4', 'norm': 'pre', 'peak_lr': '0.004', 'max_tokens': '2048',
      'dropout': '0.3', 'vocab_size': '10000', 'warmup_steps': '400', 'save_every': '250', 'average_checkpoints': '10', 'd_ff': '256',
      'n_heads': '4'}),
    ({}, '--tsv x.tsv', {'corpus': 'tsv', 'tsv': 'x.tsv', 'pair': 'None'}), # the file names no corpus, so its settings are for any
    ({'tsv': 'x.tsv', 'val_tsv': 'v.tsv'}, '--tsv y.tsv', {'tsv': 'y.tsv'}),
    ({'tsv': 'x.tsv', 'val_tsv': 'v.tsv', 'pair': 'en-fr', 'held_out': 9}, '--src a --tgt b',
     {'corpus': 'files', 'src': 'a', 'tgt': 'b', 'tsv': 'None', 'val_tsv': 'None'}),
    ({'corpus': 'multi30k', 'pair': 'de-en', 'data_dir': 'd', 'recipe': 'small'}, '--tsv x.tsv',
     {'corpus': 'tsv', 'tsv': 'x.tsv', 'pair': 'None', 'data_dir': 'None'}),
    ({'corpus': 'toy-ende', 'pair': 'en-de'}, '--corpus multi30k',
     {'corpus': 'multi30k', 'd_model': '128', 'n_layers': '4', 'norm': 'pre', 'peak_lr': '0.004', 'max_tokens': '2048'}),
])
def test_an_option_that_stands_for_several_replaces_them_all_in_the_file(tmp_path, stored, typed, changes):
    # some values are the defaults of recipe and preset before and after: that must not keep the file's
    found, warned = changed_by(tmp_path / 'c.json', OWN | stored, typed.split())
    found.pop('out', None)
    assert {name: value for name, value in found.items() if name in changes} == changes
    assert not set(found) & (OWN.keys() | {'corpus', 'pair', 'tsv', 'src', 'val_tsv', 'held_out'}) - changes.keys()
    file = OWN | stored
    lost = [name for name in file if name in found and f'--{name.replace("_", "-")} ' not in typed]
    assert all(any(f'{name}={file[name]}' in message for message in warned) for name in lost) # nothing is ignored silently
    assert bool(warned) == bool(lost)


def test_a_typed_start_replaces_the_model_in_the_file(tmp_path, trained):
    file = OWN | {'preset': 'base', 'tsv': 'x.tsv', 'warmup_steps': 7}
    found, [message] = changed_by(tmp_path / 'c.json', file, ['--start-from', str(trained)])
    config = Translator.load(trained).model.config
    assert (found['norm'], found['d_ff']) == ('pre', '64') and 'd_model' not in found # both 32
    assert (found['preset'], found['vocab_size']) == ('None', str(config.vocab_size))
    assert (found['peak_lr'], found['warmup_steps'], found['save_every']) == ('0.001', '100', '100')
    assert 'max_tokens' not in found and 'max_steps' not in found
    assert message.startswith(f'start_from={trained} replaces values of {tmp_path / "c.json"}: ') and 'norm=post, peak_lr=0.002' in message


def test_a_replaced_value_is_named_as_it_is_typed(tmp_path, capsys):
    (tmp_path / 'c.json').write_text('{"tsv": "x.tsv", "d_model": 32, "norm": "post"}')
    main(['train', '--config', str(tmp_path / 'c.json'), '--preset', 'base', '--save-config', str(tmp_path / 'new.json')])
    assert capsys.readouterr().err == f'annotated-transformer: --preset base replaces values of {tmp_path / "c.json"}: --d-model 32\n'
    assert json.loads((tmp_path / 'new.json').read_text())['norm'] == 'post'


def test_a_typed_model_keeps_the_search_in_the_file(tmp_path, trained):
    (tmp_path / 'c.json').write_text('{"beam_size": 1}')
    for command in ('translate', 'evaluate'):
        typed = parse([command, '--config', str(tmp_path / 'c.json'), '--model', str(trained)])
        assert (typed.model, typed.decoding.beam_size) == (trained, 1)


def test_files_that_are_typed_replace_those_of_a_file(tmp_path):
    (tmp_path / 'c.json').write_text('{"tsv": "x.tsv", "skip_header": true}')
    config = ['--config', str(tmp_path / 'c.json')]
    evaluate = parse(['evaluate', *config, '--src', 'a', '--tgt', 'b'])
    assert (evaluate.tsv, evaluate.src, evaluate.skip_header) == (None, Path('a'), False)
    (tmp_path / 'c.json').write_text('{"corpus": "toy-ende", "vocab_size": 70, "sample_size": 9}')
    prepare = parse(['prepare', *config, '--tsv', 'x.tsv', '--out', 'p']).plan
    assert prepare.vocab_size != 70
    assert parse(['prepare', '--out', 'p']).plan.vocab_size == parse(['train']).run.model.vocab_size # of the recipe of the corpus


def test_a_run_can_be_a_configuration(trained):
    of_run = parse(['train', '--config', str(trained / 'run.json')])
    assert asdict(of_run.run)['model']['d_model'] == 32 and of_run.run.corpus.tsv == trained.parent / 'pairs.tsv'
    assert parse(['train', '--config', str(trained / 'training.json')]).run == of_run.run


@pytest.mark.parametrize('content, message', [
    ('{"beam_sise": 3}', 'options that this command does not have: beam_sise (did you mean --beam-size?)'),
    ('{"beam-size": 3}', 'does not have: beam-size (in a file, names have _ in place of -)'),
    ('{"command": "train", "max_steps": 7}', 'does not have: max_steps (it was saved for the command train)'),
    ('{', 'is not valid JSON'), ('[]', 'holds no names of options'),
    ('{"beam_size": "3"}', '--beam-size is "3", but must be a whole number'),
    ('{"overwrite": 1}', '--overwrite is 1, but must be true or false'),
    ('{"length_penalty": "x"}', '--length-penalty is "x", but must be a number'),
    ('{"model": 1}', '--model is 1, but must be a path or null'),
    ('{"model": ""}', '--model is "", but must be a path or null'), ('{"text": [1]}', '--text is [1], but must be a list of texts'),
    ('{"on_error": "fail"}', '--on-error is "fail", but must be one of "skip", "stop"')])
def test_a_damaged_configuration(tmp_path, fails, content, message):
    (tmp_path / 'c.json').write_text(content)
    assert message in fails('translate', '--config', tmp_path / 'c.json', 'x')


def test_a_saved_path_called_run_is_not_taken_for_the_settings_of_a_run(tmp_path, run):
    run('average', 'runs/mine', '--n', 3, '--save-config', tmp_path / 'c.json')
    command = parse(['average', '--config', str(tmp_path / 'c.json')])
    assert (command.run, command.n) == (Path('runs/mine'), 3)


def test_a_recurrent_run_is_read_as_recurrent(tmp_path):
    first = parse(['train', '--architecture', 'recurrent', '--d-model', '96'])
    (tmp_path / 'run.json').write_text(json.dumps(asdict(first.run), default=str))
    assert parse(['train', '--config', str(tmp_path / 'run.json')]).run == first.run


def test_a_corpus_is_found_by_its_files(tmp_path):
    for name in ('a', 'b'):
        (tmp_path / name).write_text('x\n')
    assert parse(['train', '--tsv', str(tmp_path / 'a')]).run.corpus.corpus == 'tsv'
    assert parse(['train', '--src', str(tmp_path / 'a'), '--tgt', str(tmp_path / 'b')]).run.corpus.corpus == 'files'


# point 13 of the trial of 0.1.0
def test_your_own_files_get_the_recipe_that_is_quick_on_a_cpu(tmp_path, capsys):
    table = str(write_tsv(tmp_path / 'pairs.tsv'))
    small = parse(['train', '--tsv', table, '--recipe', 'small']).run
    assert small.model.n_layers == 2 and small.training.max_tokens == 1024
    assert parse(['train', '--tsv', table]).run == small
    files = parse(['train', '--src', table, '--tgt', table]).run
    assert (files.model, files.training) == (small.model, small.training)
    assert default_run(CorpusConfig('tsv', tsv=table)).model == small.model # in Python, too
    medium = parse(['train', '--tsv', table, '--recipe', 'medium']).run
    usual = default_run(recipe='multi30k-en-de')
    assert (medium.model, medium.training) == (usual.model, usual.training)
    assert parse(['train', '--corpus', 'multi30k']).run == usual
    assert 'those of the recipe small' in helped(capsys, 'train', '--tsv', 'x.tsv')


def test_a_large_prepared_corpus_does_not_get_the_small_recipe(tmp_path, run):
    run('prepare', '--tsv', write_tsv(tmp_path / 'pairs.tsv'), '--pair', 'en-de', '--out', tmp_path / 'ids', '--vocab-size', 300)
    assert parse(['train', '--prepared', str(tmp_path / 'ids')]).run.training == default_run(recipe='medium').training


# point 13 of the trial of 0.1.0
def test_a_start_brings_sizes_and_languages(trained):
    command = parse(['train', '--start-from', str(trained), '--dropout', '0.25'])
    config = Translator.load(trained).model.config
    assert command.run.model.d_model == config.d_model and command.run.model.dropout == 0.25
    assert command.run.corpus.pair == 'en-de' and type(command.run.model) is type(config)
    training = command.run.training
    assert (training.peak_lr, training.warmup_steps, training.save_every) == (1e-3, 100, 100) # not those of a new model
    assert command.out == Path('runs/toy-ende-from-run') # not the folder of a new model
    assert parse(['train', '--tsv', 'x.tsv', '--start-from', str(trained), '--out', 'runs/new']).out == Path('runs/new')


# --- train

# point 11 of the trial of 0.1.0
def test_a_run_explains_itself(tmp_path, run, fails):
    args = ['train', '--tsv', write_tsv(tmp_path / 'pairs.tsv'), '--out', tmp_path / 'run', *SMALL]
    text = run(*args, '--threads', torch.get_num_threads(), '--device', 'cpu').out
    for words in ('44 pairs with', '8 pairs to validate on', 'parameters', 'recipe small (--recipe medium: a larger model',
                  '--d-model 32 (was 128)', 'tsv (pairs.tsv)', '20 steps', 'cpu', 'float32',
                  str(tmp_path / 'run'), 'the lower validation loss', 'validation', 'annotated-transformer evaluate --model'):
        assert words in text, words
    before = hashes(tmp_path / 'run')
    again = run(*args).out
    assert 'was already finished' in again and '--overwrite' in again
    assert hashes(tmp_path / 'run') == before
    assert '--warmup-steps was 200 and is now 9' in fails(*args, '--warmup-steps', 9)
    assert hashes(tmp_path / 'run') == before
    assert 'resumes     after step 20' in run(*args, '--max-steps', 30).out


def test_changed_settings_are_written_as_options():
    usual = default_run(recipe='small')
    changed = replace(usual, model=replace(usual.model, norm='post'), training=replace(usual.training, compile=True, max_minutes=5.0))
    assert changed_settings(changed, 'small') == [
        '--norm post (was pre)', '--compile on (was off)', '--max-minutes 5.0 (was none)']


def mojibake(pairs):
    return [(src, tgt.replace('t', 'ä').encode().decode('cp1252')) for src, tgt in pairs]


# second trial, point 1
@pytest.mark.parametrize('change, message', [
    (lambda pairs: [(f'"{src}"', f'"{tgt}"') for src, tgt in pairs], 'both sentences are in double quotes'),
    (lambda pairs: [(str(number), f'{src}\t{tgt}') for number, (src, tgt) in enumerate(pairs)], 'cut -f2,3 FILE > NEW'),
    (lambda pairs: [(src, src) for src, _ in pairs[:9]] + pairs[9:], 'source and target are equal'),
    (mojibake, 'encoded twice (Ã¤ instead of ä): if the whole file is like this, iconv -f UTF-8 -t WINDOWS-1252'),
    (lambda pairs: mojibake(pairs[:9]) + [(src, tgt + ' ä') for src, tgt in pairs[9:]], 'repair these lines only'),
    (lambda pairs: [('# English', 'German sentence'), *pairs], 'begins with # (# English)'),
    (lambda pairs: pairs, '')])
def test_likely_mistakes_in_the_data_are_warned_about_once(tmp_path, run, change, message):
    table = write_tsv(tmp_path / 'pairs.tsv', change(PAIRS))
    for args in (['train', '--pair', 'en-de', '--out', tmp_path / 'run', *SMALL, '--max-steps', 2],
                 ['evaluate', '--samples', 0, '--max-extra-tokens', 1]):
        warned = [line for line in run(*args, '--tsv', table).err.splitlines() if f'{table}: ' in line]
        assert len(warned) == bool(message), warned
        assert all(message in line for line in warned), warned


@pytest.mark.parametrize('n_false, n, is_reported', [(1, 20, False), (2, 20, True), (2, 300, False)])
def test_one_false_alarm_is_no_mistake(n_false, n, is_reported):
    pairs = [('at the café', '«Au CAFÉ»')] * n_false + [('the dog', 'le chien')] * (n - n_false)
    assert bool(likely_mistakes(pairs)) == is_reported


def test_a_comment_and_a_csv_file_are_explained(tmp_path, fails):
    (tmp_path / 'a.tsv').write_text('# my pairs\na dog\tein Hund\n')
    (tmp_path / 'a.csv').write_text('a dog,ein Hund\n')
    assert 'Lines that begin with # are not skipped: delete them' in fails('train', '--tsv', tmp_path / 'a.tsv')
    assert 'save the table as tab-separated text' in fails('train', '--tsv', tmp_path / 'a.csv')


def test_the_first_pair_is_shown_with_its_languages(tmp_path, run):
    table = write_tsv(tmp_path / 'pairs.tsv', [(tgt, src) for src, tgt in PAIRS]) # swapped, which a person sees
    text = run('train', '--tsv', table, '--pair', 'en-fr', '--out', tmp_path / 'run', *SMALL, '--max-steps', 2).out
    assert re.search(r'Training English to French \(en-fr\).*\n +first pair +English: DOG \w+ t !\n +French: +the dog \w+ \.\n', text)
    shown = run('evaluate', '--tsv', table, '--samples', 0, '--max-extra-tokens', 1).err
    assert 'English: DOG run t !' in shown and 'German:  the dog runs .' in shown


# second trial, point 2
def test_languages_are_a_label_that_can_be_changed(tmp_path, run, fails):
    args = ['train', '--tsv', write_tsv(tmp_path / 'pairs.tsv'), '--out', tmp_path / 'run', *SMALL]
    assert 'without --pair, the source is labelled English and the target German' in run(*args).err
    weights = (tmp_path / 'run/model.safetensors').read_bytes()
    run('average', tmp_path / 'run', '--n', 2)
    printed = run(*args, '--pair', 'nl-pt_BR')
    assert 'is now labelled nl-pt_BR; it was en-de' in printed.out and 'already finished' in printed.out
    assert (tmp_path / 'run/model.safetensors').read_bytes() == weights
    for folder in (tmp_path / 'run', tmp_path / 'run/averaged-last-2', *list_checkpoints(tmp_path / 'run')):
        assert Translator.load(folder).tokenizer.langs == ('nl', 'pt_BR')
    assert '- pt_BR' in (tmp_path / 'run/README.md').read_text()
    run('evaluate', '--model', tmp_path / 'run', '--samples', 0, '--max-extra-tokens', 1)
    printed = run(*args, '--max-steps', 30) # resumes from a checkpoint with its new label, which is kept
    assert 'Training Dutch to Portuguese (nl-pt_BR)' in printed.out and 'without --pair' not in printed.err
    run('average', tmp_path / 'run', '--n', 3)
    words = ['train', '--tsv', tmp_path / 'pairs.tsv', '--out', tmp_path / 'words', *SMALL, '--max-steps', 2, '--tokenizer', 'words']
    run(*words)
    assert '--pair was' in fails(*words, '--pair', 'en-fr')


def test_a_label_changes_only_with_the_same_settings_and_data(tmp_path, run, fails):
    test = write_tsv(tmp_path / 'test.tsv', [('the wolf runs .', 'WOLF run t !')] * 3)
    args = ['train', '--tsv', write_tsv(tmp_path / 'pairs.tsv'), '--test-tsv', test, '--out', tmp_path / 'run', *SMALL]
    assert '8 pairs to validate on, 3 to test on' in ' '.join(run(*args, '--pair', 'en-de').out.split())
    before = hashes(tmp_path / 'run')
    message = fails(*args, '--pair', 'en-fr', '--dropout', 0.25)
    assert '--dropout was 0.1 and is now 0.25)' in message and 'labelled' not in message
    assert "(--test-tsv was 'given' and is now not set)" in fails(*args[:3], *args[5:], '--pair', 'en-fr')
    write_tsv(test, [('the wolf sings .', 'WOLF sing t !')] * 3)
    assert 'has changed' in fails(*args, '--pair', 'en-fr')
    write_tsv(test, [('the wolf runs .', 'WOLF run t !')] * 3)
    assert hashes(tmp_path / 'run') == before
    printed = run(*args, '--pair', 'de-en')
    assert 'now labelled de-en' in printed.out and 'only the label has changed' in printed.err
    assert 'only the label' not in run(*args, '--pair', 'de-fr').err


def test_the_likely_pair_names_no_language_that_cannot_be_judged(tmp_path, run):
    french = [(f'the dog is in the house {i}', f'le chien est dans la maison et les chats {i}') for i in range(40)]
    printed = run('train', '--tsv', write_tsv(tmp_path / 'pairs.tsv', french), '--pair', 'de-cs', '--out', tmp_path / 'run', *SMALL,
                  '--max-steps', 1)
    assert 'look like en-fr, not de-cs: if they are, use --pair en-fr' in printed.err
    assert '; then it scores 4 validation pairs' in ' '.join(printed.out.split())


def test_a_finished_model_without_its_tokenizer_is_not_an_unfinished_run(trained, fails, tmp_path):
    shutil.copytree(trained, tmp_path / 'run')
    (tmp_path / 'run/tokenizer.json').unlink()
    message = fails('translate', '--model', tmp_path / 'run', 'A sentence.')
    assert 'it has no tokenizer.json' in message and 'not finished' not in message


def test_pairs_in_other_languages_are_warned_about(tmp_path, run):
    pairs = [(f'the dog and the cat {n}', f'der Hund und die Katze {n}') for n in range(60)]
    table = write_tsv(tmp_path / 'pairs.tsv', pairs)
    args = ['train', '--tsv', table, *SMALL, '--max-steps', 1]
    warned = run(*args, '--pair', 'de-en', '--out', tmp_path / 'a').err
    assert 'the first 48 pairs look like en-de, not de-en: if they are, use --pair en-de; ' in warned
    assert 'to translate in the direction de-en, exchange the columns of the table' in warned
    warned = run(*args, '--pair', 'en-pt_BR', '--out', tmp_path / 'b').err
    assert 'look like en-de, not en-pt_BR: if they are, use --pair en-de\n' in warned
    for pair in ('en-de', 'en-xx', 'xx-de'):
        assert 'look like' not in run(*args, '--pair', pair, '--out', tmp_path / pair).err
    few = [('the dog', 'chien')] * 9 + [('le chien', 'the dog'), ('un chat', 'a cat')] # short texts prove nothing
    assert not likely_mistakes(few, langs=('fr', 'en'))


def test_a_run_that_was_still_improving_is_noticed():
    falling = [{'step': n, 'val_loss': 9 - n, 'val_bleu': n} for n in range(3)]
    assert is_still_improving(falling, 'val_loss') and is_still_improving(falling, 'val_bleu')
    assert not is_still_improving([*falling, {'step': 3, 'val_loss': 7.5, 'val_bleu': 1}], 'val_loss')
    assert not is_still_improving([*falling, {'step': 3, 'val_loss': 6.5, 'val_bleu': 1}], 'val_bleu')
    assert not is_still_improving(falling[:1], 'val_loss') and not is_still_improving([], 'val_loss')


# second trial, point 8
def test_a_run_says_which_limit_it_has_reached(tmp_path, run):
    args = ['train', '--tsv', write_tsv(tmp_path / 'pairs.tsv'), '--pair', 'en-de', '--out', tmp_path / 'run', *SMALL]
    for limit in (['--max-steps', 7], ['--max-epochs', 9], ['--max-minutes', 0.001]):
        text = run(*args, '--max-steps', 5000, *limit).out
        assert f'has reached its limit, {limit[0]} {limit[1]}' in text
        assert f'to train longer, run the same command with a higher {limit[0]}' in text
    assert 'validation loss was still improving: to train longer' in text
    text = run(*args[:-len(SMALL)], '--overwrite', *SMALL, '--max-steps', 9000, '--save-every', 1, '--patience', 1, '--peak-lr', 5).out
    assert 'stopped early: no improvement in 1 validation (--patience 1)' in text and 'higher' not in text


def test_a_folder_of_other_files_is_not_touched(fails, tmp_path):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out/thesis.txt').write_text('mine')
    message = fails('train', '--tsv', write_tsv(tmp_path / 'pairs.tsv'), '--out', tmp_path / 'out', *SMALL)
    assert 'holds no run' in message
    assert [path.name for path in (tmp_path / 'out').iterdir() if path.name != 'run.lock'] == ['thesis.txt']


@pytest.mark.parametrize('overwrite', [False, True])
@pytest.mark.parametrize('command', ['train', 'demo'])
def test_an_interruption_says_how_to_resume(tmp_path, monkeypatch, capsys, command, overwrite):
    def stop(*args, **options):
        raise Interrupted('step 5 is saved in RUN: run the same command again to resume', signal.SIGTERM)
    monkeypatch.setattr(train_command, 'train_translator', stop)
    with pytest.raises(SystemExit) as ended:
        main([command, '--out', str(tmp_path / 'run'), *['--overwrite'] * overwrite])
    message = capsys.readouterr().err
    assert ended.value.code == 143 and 'step 5 is saved in RUN: run the same command ' in message
    assert ('without --overwrite' in message) == overwrite


def test_an_early_interruption_promises_no_checkpoint(tmp_path, monkeypatch, capsys):
    def stop(*args, **options):
        raise KeyboardInterrupt
    monkeypatch.setattr(train_command, 'train_translator', stop)
    with pytest.raises(SystemExit) as ended:
        main(['train', '--out', str(tmp_path / 'run')])
    assert ended.value.code == 130 and 'there was no checkpoint yet' in capsys.readouterr().err


def test_a_stopped_run_saves_and_resumes(tmp_path, monkeypatch, capsys):
    "SIGTERM in the middle: a saved step, its own exit code, and in the end the weights of a run without it."
    args = ['train', '--tsv', str(write_tsv(tmp_path / 'pairs.tsv')), *SMALL]
    step = Trainer.step
    def stops(self, batches):
        step(self, batches)
        if self.progress.step == 13:
            signal.raise_signal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, 'step', stops)
        with pytest.raises(SystemExit) as ended:
            main([*args, '--out', str(tmp_path / 'a')])
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 143 and re.search(r'step 1[34] is saved in', message) and 'same command' in message
    assert not (tmp_path / 'a/training.json').exists()
    for out in ('a', 'b'):
        main([*args, '--out', str(tmp_path / out)])
    assert (tmp_path / 'a/model.safetensors').read_bytes() == (tmp_path / 'b/model.safetensors').read_bytes()


def test_too_little_memory_is_said_in_one_line(monkeypatch, fails):
    for error in (MemoryError(), torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 bytes'),
                  RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")):
        def stop(args, error=error):
            raise error
        monkeypatch.setattr(cli, 'run', stop)
        assert 'not enough memory' in fails('train')
    for message in ('a bug', 'CUDA error: an illegal memory access was encountered'):
        def bug(args, message=message):
            raise RuntimeError(message)
        monkeypatch.setattr(cli, 'run', bug)
        with pytest.raises(RuntimeError, match=message):
            main(['train'])


def test_a_traceback_for_those_who_look_for_a_bug(monkeypatch, capsys):
    for wanted in ('', '1'):
        monkeypatch.setenv('ANNOTATED_TRANSFORMER_DEBUG', wanted)
        with pytest.raises(SystemExit):
            main(['translate', '--model', 'nowhere', 'x'])
        assert ('Traceback' in capsys.readouterr().err) == bool(wanted)


# --- translate

class Pipe:
    "Standard input with these lines, as a pipe or as a terminal."
    def __init__(self, data, is_terminal=False):
        self.reader, writer = os.pipe()
        os.write(writer, data)
        os.close(writer)
        self.is_terminal = is_terminal

    def fileno(self):
        return self.reader

    def isatty(self):
        return self.is_terminal

    @property
    def buffer(self):
        return os.fdopen(self.reader, 'rb')


def test_every_line_has_a_line(monkeypatch, run):
    monkeypatch.setattr(sys, 'stdin', Pipe('The cat sleeps.\n\n  \n☃ naïve\r\nThe dog sleeps.'.encode()))
    lines = run('translate').out.split('\n')
    assert len(lines) == 6 and lines[1] == lines[2] == lines[5] == ''
    assert (lines[0], lines[4]) == ('Die Katze schläft.', 'Der Hund schläft.')
    assert run('translate', 'The cat sleeps.', 'The dog sleeps.').out.splitlines() == [lines[0], lines[4]]


def test_a_terminal_gets_a_prompt(monkeypatch, run):
    assert END_OF_INPUT == ('Ctrl-Z and Enter' if os.name == 'nt' else 'Ctrl-D')
    for keys in ('Ctrl-D', 'Ctrl-Z and Enter'):
        monkeypatch.setattr(translate_command, 'END_OF_INPUT', keys)
        monkeypatch.setattr(sys, 'stdin', Pipe('The cat sleeps.\r\n☃ naïve\n'.encode(), is_terminal=True))
        printed = run('translate')
        assert printed.out.splitlines()[0] == 'Die Katze schläft.' and len(printed.out.splitlines()) == 2
        assert f'Press {keys} to stop' in printed.err and printed.err.count('en> ') == 3


def test_output_is_utf8_whatever_the_system_writes():
    environment = os.environ | {'PYTHONIOENCODING': 'cp1252', 'PYTHONUTF8': '0'} # as on Windows for files and pipes
    done = subprocess.run([sys.executable, '-m', 'annotated_transformer', 'translate', '--prefix', 'Łódź', '--engine', 'pytorch'],
                          input='Łódź ☃ naïve\n'.encode(), capture_output=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0 and done.stdout.decode('utf-8').startswith('Łódź'), done.stderr
    assert 'unknown to the tokenizer' in done.stderr.decode('utf-8') and '☃' in done.stderr.decode('utf-8')


def test_a_terminal_keeps_its_encoding_and_never_fails(monkeypatch):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True
    screen = Terminal(io.BytesIO(), encoding='cp1252')
    monkeypatch.setattr(sys, 'stdout', screen)
    cli.use_utf8()
    print('Łódź ü', end='', flush=True)
    assert screen.encoding == 'cp1252' and screen.buffer.getvalue().decode('cp1252') == '?ód? ü'


def test_lines_are_passed_on_as_they_arrive():
    reader, writer = os.pipe()
    lines = live_lines(reader)
    os.write(writer, b'one\ntwo\nthr')
    assert [next(lines) for _ in range(3)] == [b'one', b'two', FLUSH]
    os.write(writer, b'ee\n')
    os.close(writer)
    assert list(lines) == [b'three', FLUSH]
    os.close(reader)


def test_lines_that_are_not_text(monkeypatch, run, fails):
    data = b'The cat sleeps.\n\xff\xfe\nThe dog sleeps.\n'
    monkeypatch.setattr(sys, 'stdin', Pipe(data))
    printed = run('translate')
    assert printed.out.split('\n') == ['Die Katze schläft.', '', 'Der Hund schläft.', '']
    assert len(printed.err.splitlines()) == 2 and '1 of 3 lines' in printed.err and 'line 2: not UTF-8' in printed.err
    monkeypatch.setattr(sys, 'stdin', Pipe(data))
    assert 'line 2' in fails('translate', '--on-error', 'stop')


def test_a_file_becomes_a_file(tmp_path, run, fails):
    source, out = tmp_path / 'in.txt', tmp_path / 'out.txt'
    source.write_bytes(b'The cat sleeps.\n\nThe dog sleeps.')
    run('translate', '--input', source, '--output', out, '--prefix', 'Die')
    lines = out.read_text(encoding='utf-8').split('\n')
    assert len(lines) == 4 and lines[2].startswith('Die') and lines[1] == lines[3] == ''
    packed = tmp_path / 'in.txt.gz'
    packed.write_bytes(gzip.compress(source.read_bytes()))
    run('translate', '--input', packed, '--output', tmp_path / 'out.gz', '--prefix', 'Die')
    assert gzip.decompress((tmp_path / 'out.gz').read_bytes()) == out.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['in.txt', 'in.txt.gz', 'out.gz', 'out.txt']
    packed.write_bytes(packed.read_bytes()[:-5])
    assert 'not a complete gzip file' in fails('translate', '--input', packed)
    assert 'not both' in fails('translate', '--input', source, 'hello')


# point 1 of the trial of 0.1.0
def test_no_file_is_replaced_by_accident(tmp_path, fails, run):
    source, out = tmp_path / 'in.txt', tmp_path / 'out.txt'
    source.write_text('The cat sleeps.\n')
    out.write_text('three hours of work\n')
    others = [source, tmp_path / '..' / tmp_path.name / 'in.txt']
    if os.name != 'nt': # Windows asks for rights to make links
        (tmp_path / 'link').symlink_to(source)
        others.append(tmp_path / 'link')
    for other in others:
        assert 'would be replaced' in fails('translate', '--input', source, '--output', other, '--overwrite')
    assert 'exists' in fails('translate', '--input', source, '--output', out)
    assert 'there is no folder' in fails('translate', '--input', source, '--output', tmp_path / 'no/out.txt')
    assert (source.read_text(), out.read_text()) == ('The cat sleeps.\n', 'three hours of work\n')
    run('translate', '--input', source, '--output', out, '--overwrite')
    assert out.read_text() == 'Die Katze schläft.\n'


def interrupt_after(monkeypatch, n, error=KeyboardInterrupt):
    "Let translating stop after n sentences."
    original = Translator.translate_n_best
    def stops(self, *args, **options):
        for number, result in enumerate(original(self, *args, **options)):
            if number == n:
                raise error
            yield result
    monkeypatch.setattr(Translator, 'translate_n_best', stops)


# point 4 of the trial of 0.1.0
@pytest.mark.skipif(os.name == 'nt', reason='Windows has no SIGTERM that a program can catch')
def test_sigterm_keeps_what_a_program_has_translated(tmp_path):
    (tmp_path / 'in.txt').write_text('The cat sleeps.\nThe dog sleeps.\n' * 20_000)
    command = [sys.executable, '-m', 'annotated_transformer', 'translate', '--input', tmp_path / 'in.txt', '--output', tmp_path / 'out.txt',
               '--engine', 'pytorch', '--beam-size', '1']
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
    partial = tmp_path / 'out.txt.partial'
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    lines = partial.read_text(encoding='utf-8').splitlines()
    assert process.returncode == 143 and len(lines) > 60 and set(lines) == {'Die Katze schläft.', 'Der Hund schläft.'}
    message = f'interrupted; {len(lines):,} translations are in {partial}: run the same command again to continue'
    assert message in errors and not (tmp_path / 'out.txt').exists()


# point 4 of the trial of 0.1.0
@pytest.mark.parametrize('n_best', [1, 2])
def test_an_interrupted_translation_continues(tmp_path, monkeypatch, capsys, run, fails, n_best):
    source, out = tmp_path / 'in.txt', tmp_path / 'out.txt'
    source.write_text(''.join(f'The {noun} sleeps.\n' for noun in ('cat', 'dog', 'child', 'man', 'woman')))
    args = ['translate', '--input', source, '--output', out, '--n-best', n_best, '--buffer-size', 2]
    complete = run(*args[:3], '--n-best', n_best).out
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
    message = capsys.readouterr().err
    assert ended.value.code == 130 and '3 translations are in' in message and 'same command' in message
    assert not out.exists()
    partial = tmp_path / 'out.txt.partial'
    assert partial.read_text() == ''.join(complete.splitlines(True)[:3 * n_best])
    assert 'another search' in fails(*args, '--beam-size', 3)
    with open(partial, 'a') as file: # killed in the middle of a line
        file.write('4\tunfin')
    if n_best == 2:                  # the third sentence may lack lines, so it is translated again
        assert 'holds 2 translations' in run(*args).err
    else:
        partial.write_text(''.join(complete.splitlines(True)[:3]) + 'unfin')
        assert 'holds 3 translations' in run(*args).err
    assert out.read_text() == complete
    assert sorted(path.name for path in tmp_path.iterdir()) == ['in.txt', 'out.txt']


def test_paragraphs_are_translated_sentence_by_sentence(tmp_path, monkeypatch, run, fails):
    source, out = tmp_path / 'in.txt', tmp_path / 'out.txt'
    source.write_text('The cat sleeps. The dog sleeps.\n\nThe man sleeps.\n')
    args = ['translate', '--input', source, '--output', out, '--split-sentences', '--buffer-size', 1]
    run(*args)
    complete = 'Die Katze schläft. Der Hund schläft.\n\nDer Mann schläft.\n'
    assert out.read_text() == complete
    out.unlink()
    with monkeypatch.context() as patch: # after the first line, which has two sentences
        interrupt_after(patch, 3)
        with pytest.raises(SystemExit):
            main([str(arg) for arg in args])
    assert 0 < len((tmp_path / 'out.txt.partial').read_text()) < len(complete)
    assert 'left from a command with another' in fails(*[arg for arg in args if arg != '--split-sentences'])
    run(*args)
    assert out.read_text() == complete
    assert 'leave --prefix and --n-best out' in fails('translate', '--split-sentences', '--n-best', 2, 'A dog.')


def test_a_pipe_of_paragraphs_is_answered_line_by_line(monkeypatch, run):
    monkeypatch.setattr(sys, 'stdin', Pipe(b'The cat sleeps. The dog sleeps.\n'))
    assert run('translate', '--split-sentences').out == 'Die Katze schläft. Der Hund schläft.\n'


def test_the_missing_splitter_is_named(monkeypatch, fails):
    monkeypatch.setitem(sys.modules, 'sentencex', None)
    assert 'annotated_transformer[split]' in fails('translate', '--split-sentences', 'A dog. A cat.')


def test_a_partial_output_of_other_input_is_kept(tmp_path, fails):
    source, out = tmp_path / 'in.txt', tmp_path / 'out.txt'
    source.write_text('The cat sleeps.\n')
    settings = {'input': {'size': 1}, 'model': {}}
    with pytest.raises(KeyboardInterrupt), PartialOutput(out, settings).open() as file:
        file.write(['Die Katze schläft.'])
        raise KeyboardInterrupt
    assert 'another input' in fails('translate', '--input', source, '--output', out)
    assert 'without --input' in fails('translate', '--output', out, 'The cat sleeps.')
    assert (tmp_path / 'out.txt.partial').read_text() == 'Die Katze schläft.\n'


def test_an_interrupted_replacement_continues(tmp_path, monkeypatch, run):
    source, out = tmp_path / 'in.txt', tmp_path / 'out.txt'
    source.write_text('The cat sleeps.\nThe dog sleeps.\nThe man sleeps.\n')
    out.write_text('old\n')
    args = ['translate', '--input', source, '--output', out, '--buffer-size', 1]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(SystemExit):
            main([str(arg) for arg in [*args, '--overwrite']])
    assert out.read_text() == 'old\n'
    assert 'holds 2 translations' in run(*args).err # without --overwrite, as the message says
    assert out.read_text() == 'Die Katze schläft.\nDer Hund schläft.\nDer Mann schläft.\n'


def test_two_commands_do_not_write_one_output(tmp_path, fails, run):
    source, out = tmp_path / 'in.txt', tmp_path / 'out.txt'
    source.write_text('The cat sleeps.\n')
    with lock_file(tmp_path / 'out.txt.partial.lock', 'out.txt', 'wait'):
        assert 'out.txt is in use by process' in fails('translate', '--input', source, '--output', out)
    assert not out.exists()
    run('translate', '--input', source, '--output', out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['in.txt', 'out.txt']


def test_lines_of_several_sentences_are_named(monkeypatch, run):
    text = b'The cat sleeps.\nThe cat sleeps. The dog sleeps. The man sleeps.\n'
    for options, warns in (((), True), (('--split-sentences',), False)):
        monkeypatch.setattr(sys, 'stdin', Pipe(text))
        printed = run('translate', *options)
        assert ('1 line of the input may hold several sentences (the first is line 2)' in printed.err) == warns


# point 9 of the trial of 0.1.0
def test_a_table_without_its_option_is_recognized(fails):
    assert 'did you mean --tsv pairs.tsv?' in fails('train', 'pairs.tsv')


def test_folders_that_hold_no_model_are_named(fails, tmp_path):
    assert 'is not a model folder' in fails('train', '--tsv', 'a', '--start-from', tmp_path)
    assert 'is not the folder of a run' in fails('average', tmp_path)


def test_files_in_two_places_are_refused(fails):
    assert '--tsv is given 2 times: name all files after one --tsv' in fails('train', '--tsv', 'a', '--tsv', 'b')


@pytest.mark.parametrize('option, value, message', [
    ('--max-minutes', '5m', '--max-minutes 5m is not a number'), ('--seed', -1, '--seed -1 must be a finite number'),
    ('--max-epochs', '0.5', '--max-epochs 0.5 is not a whole number')])
def test_bad_numbers_are_named(fails, option, value, message):
    assert message in fails('train', option, value)


def test_an_empty_name_is_no_file(fails):
    for args in (('train', '--tsv', ''), ('translate', '--model', '', 'A dog.'), ('train', '--out', '')):
        assert f'{args[1]} is empty: name a file' in fails(*args)


def test_a_blank_sentence_has_no_attention(fails, tmp_path):
    assert 'the sentence is blank' in fails('attention', ' ', '--output', tmp_path / 'a.html')
    assert not list(tmp_path.iterdir())


def test_configurations_are_json(fails, tmp_path):
    assert 'a name that ends in .json' in fails('translate', 'A dog.', '--save-config', tmp_path / 'c.yaml')
    (tmp_path / 'd.yaml').write_text('beam_size: 3\n')
    assert 'd.yaml is not valid JSON' in fails('translate', 'A dog.', '--config', tmp_path / 'd.yaml')
    assert [path.name for path in tmp_path.iterdir()] == ['d.yaml']


def test_an_early_stop_says_that_nothing_is_done(tmp_path, monkeypatch, capsys):
    (tmp_path / 'in.txt').write_text('The cat sleeps.\n')
    interrupt_after(monkeypatch, 0)
    with pytest.raises(SystemExit):
        main(['translate', '--input', str(tmp_path / 'in.txt'), '--output', str(tmp_path / 'out.txt')])
    assert 'interrupted; no translation was finished yet' in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['in.txt']


def test_a_stopped_evaluation_says_so(monkeypatch, capsys):
    monkeypatch.setattr(Translator, 'translate', lambda *args, **options: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        main(['evaluate', '--split', 'val'])
    assert ended.value.code == 143 and 'annotated-transformer: interrupted' in capsys.readouterr().err


def test_a_run_that_still_trains_is_named(trained, fails, tmp_path):
    shutil.copytree(trained, tmp_path / 'run')
    for name in ('config.json', 'model.safetensors', 'training.json'):
        (tmp_path / 'run' / name).unlink()
    for args in (('translate', '--model', tmp_path / 'run', 'A dog.'), ('train', '--start-from', tmp_path / 'run')):
        message = fails(*args)
        assert 'not finished' in message and message.endswith('step-00000020'), message
    assert 'not a model folder: it does not exist' in fails('train', '--tsv', 'a', '--start-from', tmp_path / 'nowhere')
    assert 'is not the folder of a run' in fails('average', tmp_path / 'nowhere')


def test_report_and_model_card_agree_on_epochs(tmp_path, run):
    args = ['train', '--tsv', write_tsv(tmp_path / 'pairs.tsv'), '--out', tmp_path / 'run', *SMALL, '--max-tokens', 200, '--max-steps', 21]
    n_epochs = re.search(r'trained .*, ([\d.]+) epochs', run(*args).out)[1]
    assert f'| epochs | {n_epochs} |' in (tmp_path / 'run/README.md').read_text() and '.' in n_epochs


def test_skipped_lines_are_listed_by_reason_up_to_a_tenth(tmp_path, run, fails):
    rows = [f'{src}\t{tgt}'.encode() for src, tgt in PAIRS * 3]
    table = tmp_path / 'pairs.tsv'
    table.write_bytes(b'\n'.join([*rows, b'a\0b\tc', 'a café\tein Café'.encode('latin-1'), b'one column', b'\tb']) + b'\n')
    args = ['train', '--tsv', table, '--out', tmp_path / 'run', *SMALL]
    assert 'a NUL character' in fails(*args)
    printed = run(*args, '--on-error', 'skip')
    assert 'left out    1 blank, 1 NUL character, 1 not UTF-8, 1 one column' in printed.out
    assert 'left out 2 of 184 lines (NUL character: 1, not UTF-8: 1)' in printed.err
    table.write_bytes(b'\n'.join(rows + ['ein Café\tun café'.encode('latin-1')] * 40))
    message = fails('train', '--tsv', table, '--out', tmp_path / 'b', *SMALL, '--on-error', 'skip')
    assert 'too many bad lines to leave out, 40 of 220 lines (not UTF-8: 40)' in message
    assert "if this is Windows-1252 or Latin-1, so that it reads 'Café'" in message and not (tmp_path / 'b').exists()


# point 9 of the trial of 0.1.0
def test_the_guide_lists_the_messages_of_the_program(tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    rows = [f'{src}\t{tgt}\n' for src, tgt in PAIRS]
    table = ''.join(rows)
    contents = {'pairs.tsv': table, 'one.tsv': table + 'the dog DOG\n', 'bad.tsv': table + 'the dog DOG\n' * 20,
                'few.tsv': ''.join(rows[:2]), 'a.en': 'one\n' * 9, 'a.de': 'eins\n' * 4 + '\n' + 'eins\n' * 3}
    for name, text in contents.items():
        Path(name).write_text(text)
    Path('latin.tsv').write_bytes(f'{table}the café\tDAS CAFÉ\n'.encode('latin-1'))
    Path('utf16.tsv').write_text(table, encoding='utf-16')
    Path('book.xlsx').write_bytes(b'PK\x03\x04rest')
    main(['train', '--tsv', 'pairs.tsv', '--out', 'run', *SMALL])
    shutil.copytree('run', 'unfinished')
    for name in ('config.json', 'model.safetensors', 'training.json'):
        Path('unfinished', name).unlink()

    def train(*files, options=()):
        return fails('train', *files, '--out', 'new', *SMALL, *options)

    def changed_data():
        write_tsv(Path('pairs.tsv'), [*PAIRS, ('the dog', 'DOG')])
        return fails('train', '--tsv', 'pairs.tsv', '--out', 'run', *SMALL)

    def no_memory():
        with monkeypatch.context() as context:
            context.setattr(cli, 'run', lambda args: torch.zeros(10 ** 15))
            return fails('train')

    found = [
        train('--tsv', 'one.tsv'),
        train('--src', 'a.en', '--tgt', 'a.de'),
        train('--tsv', 'latin.tsv'),
        train('--tsv', 'bad.tsv', options=['--on-error', 'skip']),
        fails('translate', '--model', 'unfinished', 'A dog.'),
        train('--tsv', 'utf16.tsv'),
        train('--tsv', 'book.xlsx'),
        fails('train', '--tsv', 'pairs.tsv', '--out', 'run', *SMALL, '--d-ff', 32),
        changed_data(),
        no_memory(),
        train('--tsv', 'few.tsv'),
    ]
    cells = json.loads((ROOT / 'nbs/34_your_own_data.ipynb').read_text(encoding='utf-8'))['cells']
    (section,) = [text for text in (''.join(cell['source']) for cell in cells) if '## Messages, and what to do' in text]
    listed = [message for row in re.findall(r'^\| (`.*?) \|', section, re.M) for message in re.findall('`(.*?)`', row)]
    assert len(listed) == len(found)
    for words, message in zip(listed, found):
        assert re.search(re.escape(words).replace('…', '.*'), message), (words, message)
    assert 'line 5 is the first that is blank' in found[1] and 'iconv -f' in found[2]
    assert found[-1].endswith('add pairs, or give --val-tsv')


def test_a_run_that_was_stopped_before_its_score_is_evaluated(trained, tmp_path, run):
    shutil.copytree(trained, tmp_path / 'run')
    (tmp_path / 'run/training.json').unlink() # written after the final evaluation
    assert 'tsv val: 8 sentences' in run('evaluate', '--model', tmp_path / 'run', '--split', 'val', '--samples', 0).out


def test_a_model_is_not_scored_on_changed_data(tmp_path, run, fails):
    table = write_tsv(tmp_path / 'pairs.tsv')
    run('train', '--tsv', table, '--out', tmp_path / 'run', *SMALL)
    run('evaluate', '--model', tmp_path / 'run', '--samples', 0)
    write_tsv(table, PAIRS[:40])
    message = fails('evaluate', '--model', tmp_path / 'run', '--samples', 0)
    assert 'pairs.tsv has changed (-' in message and 'may have been trained on' in message
    assert 'pairs.tsv has changed (-' in fails('evaluate', '--model', list_checkpoints(tmp_path / 'run')[0], '--samples', 0)
    run('evaluate', '--model', tmp_path / 'run', '--tsv', table, '--samples', 0)


def test_chosen_weights_are_the_lower_of_two_and_the_lowest_of_three():
    row = {'val_loss_last': 2.0, 'val_loss_averaged': 1.0}
    assert chosen_weights([row], 'val_loss') == 'the average of several checkpoints has the lower validation loss: 1.000 (last 2.000)'
    assert chosen_weights([row | {'val_loss_best': 1.5}], 'val_loss') == (
        'the average of several checkpoints has the lowest validation loss: 1.000 (last 2.000, best 1.500)')
    assert 'have the higher validation BLEU: 2.000' in chosen_weights([{'val_bleu_last': 2.0, 'val_bleu_averaged': 1.0}], 'val_bleu')


def test_a_run_that_ends_too_soon_says_so(tmp_path, run):
    args = ['train', '--tsv', write_tsv(tmp_path / 'pairs.tsv'), '--out', tmp_path / 'run', *SMALL]
    text = run(*args, '--max-steps', 5, '--save-every', 250).out
    assert 'only 5 steps in all: choose at most 5 for --save-every (now 250) and --warmup-steps (now 200)' in text


def test_nothing_is_left_when_nothing_was_translated(tmp_path, fails):
    (tmp_path / 'in.txt').write_bytes(b'\xff\n')
    fails('translate', '--input', tmp_path / 'in.txt', '--output', tmp_path / 'out.txt', '--on-error', 'stop')
    assert [path.name for path in tmp_path.iterdir()] == ['in.txt']


def test_several_translations_of_each_sentence(run, capsys):
    assert 'with --n-best N, up to N lines' in helped(capsys, 'translate')
    rows = [line.split('\t') for line in run('translate', '--n-best', 2, 'The cat sleeps.', 'The dog sleeps.').out.splitlines()]
    assert [row[0] for row in rows] == ['1', '1', '2', '2'] and float(rows[0][1]) >= float(rows[1][1])


def test_every_search_setting_is_an_option():
    other = DecodingConfig(3, 1.0, 0.0, 9, 1, 2, 2, 1.0)
    assert all(value != getattr(DecodingConfig(), name) for name, value in asdict(other).items())
    options = []
    for name, value in asdict(other).items():
        name = {'patience': 'beam_patience'}.get(name, name)
        options += ['--' + name.replace('_', '-'), str(value)]
    assert parse(['translate', *options]).decoding == other


def test_a_reader_that_leaves_ends_the_command(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, 'w') as out:
        monkeypatch.setattr(sys, 'stdout', out)
        with pytest.raises(SystemExit) as ended:
            main(['translate', '--model', str(SHIPPED), 'The cat sleeps.'])
    assert (ended.value.code, capsys.readouterr().err) == (141, '')


def test_warnings_of_callers_are_left_alone(run):
    before = warnings.showwarning
    assert 'annotated-transformer: ' in run('translate', 'The dog runs. ' * 300, '--max-extra-tokens', 3, '--beam-size', 1).err
    assert warnings.showwarning is before


# --- evaluate

# point 5 of the trial of 0.1.0
def test_your_own_pairs_are_scored_completely(tmp_path, run, fails):
    table = write_tsv(tmp_path / 'my.tsv', [('The cat sleeps.', 'Die Katze schläft.')] * 30)
    for name, line in (('s', 'The cat sleeps.\n'), ('t', 'Die Katze schläft.\n')):
        (tmp_path / name).write_text(line * 30)
    for options in (['--tsv', table], ['--corpus', 'tsv', '--tsv', table], ['--src', tmp_path / 's', '--tgt', tmp_path / 't']):
        printed = run('evaluate', *options, '--samples', 0)
        assert re.match(r'\S+: 30 sentences\n  BLEU 100.00', printed.out)
    assert 'leave it out' in fails('evaluate', '--tsv', table, '--split', 'val')
    assert 'one is missing' in fails('evaluate', '--src', table)
    assert 'de-en' in fails('evaluate', '--tsv', table, '--pair', 'de-en')


def test_a_model_is_scored_on_what_it_was_trained_on(trained, run, fails, tmp_path):
    step = list_checkpoints(trained)[-1]
    for folder in (trained, step):
        found = json.loads(run('evaluate', '--model', folder, '--json', '--samples', 0, '--max-extra-tokens', 2,
                               '--output', tmp_path / f'{folder.name}.txt').out)
        references = [tgt for _, tgt in load_corpus(parse(['train', '--config', str(trained / 'run.json')]).run.corpus)['test']]
        lines = (tmp_path / f'{folder.name}.txt').read_text().splitlines()
        assert found['sentences'] == len(references) == len(lines) and next(iter(found)) == 'sentences'
        assert found['bleu'] == score(lines, references).bleu
        assert found['tokens_per_second'] > found['sentences_per_second'] > 0 and found['perplexity'] > 1
    assert "no split 'exam'" in fails('evaluate', '--model', trained, '--split', 'exam')
    shutil.copytree(trained, tmp_path / 'copy')
    for name in ('run.json', 'training.json'):
        (tmp_path / 'copy' / name).write_text('{}')
    assert 'does not say which corpus' in fails('evaluate', '--model', tmp_path / 'copy')


def test_translations_of_any_system(tmp_path, run, fails):
    for name, lines in {'ours': 'Ein Hund.\n' * 3, 'refs': 'Ein Hund .\n' * 3, 'short': 'Ein Hund.\n'}.items():
        (tmp_path / name).write_text(lines)
    both = ['--translations', tmp_path / 'ours', '--references', tmp_path / 'refs', '--samples', 0]
    assert 'ours: 3 sentences' in run('evaluate', *both).out
    assert 'the other system: BLEU' in run('evaluate', *both, '--against', tmp_path / 'ours').out
    assert '1 line, but there are 3 references' in fails('evaluate', *both, '--against', tmp_path / 'short')
    assert 'one is missing' in fails('evaluate', '--translations', tmp_path / 'ours')
    assert 'absent' in fails('evaluate', '--translations', tmp_path / 'absent', '--references', tmp_path / 'refs')
    assert 'would be replaced' in fails('evaluate', *both, '--output', tmp_path / 'refs', '--overwrite')
    assert '.doc must end in .png' in fails('evaluate', *both, '--plot', tmp_path / 'a.doc')
    run('evaluate', *both, '--plot', tmp_path / 'a.png')
    assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize('option, value', [('--against', 'typo'), ('--tokenized-references', 'typo'), ('--samples', '20')])
def test_evaluate_checks_its_input_before_it_translates(monkeypatch, fails, option, value):
    monkeypatch.setattr(Translator, 'translate', lambda *args, **options: pytest.fail('it translated first'))
    assert value in fails('evaluate', option, value)


# --- the other commands

def test_average(trained, run, fails, tmp_path):
    out = tmp_path / 'mean'
    assert 'is the average of step-00000010, step-00000020' in run('average', trained, '--n', 2, '--out', out).out
    assert run('translate', '--model', out, '--max-extra-tokens', 1, 'the dog runs .').out.count('\n') == 1
    assert 'keeps 2 of its 9 last checkpoints' in fails('average', trained, '--n', 9)
    assert 'no val_bleu in its log' in fails('average', trained, '--best', '--monitor', 'val_bleu')
    assert '--n 0 must be at least 1' in fails('average', trained, '--n', 0)
    assert 'mean exists: choose another --out, or use --overwrite' in fails('average', trained, '--n', 1, '--out', out)
    before = hashes(out)[Path('model.safetensors')]
    run('average', trained, '--n', 1, '--out', out, '--overwrite')
    assert hashes(out)[Path('model.safetensors')] != before and (out / 'README.md').is_file()
    for folder in (trained, list_checkpoints(trained)[0]): # no average
        before = hashes(folder)
        assert 'is not an average of checkpoints' in fails('average', trained, '--n', 1, '--out', folder, '--overwrite')
        assert hashes(folder) == before
    with lock_folder(trained):
        assert 'is in use by process' in fails('average', trained, '--n', 2)


def test_the_last_checkpoints_are_those_on_schedule(tmp_path):
    (tmp_path / 'run.json').write_text('{"training": {"save_every": 100}}')
    rows = [{'step': step, 'val_loss': 1.0} for step in (100, 200, 300, 350, 400, 450)]
    assert model_commands.Average(tmp_path, n=3).last_steps(rows) == [300, 400, 450] # 350: an interruption


def test_attention_is_a_page(run, fails, tmp_path):
    path = tmp_path / 'maps.html'
    assert 'maps.html' in run('attention', 'The cat sleeps.', '--output', path).out
    assert '<html' in path.read_text(encoding='utf-8')
    assert 'exists' in fails('attention', 'The cat sleeps.', '--output', path)


# second trial, points 3, 4 and 6: arguments that are not sentences, and tables
@pytest.mark.parametrize('args, message', [
    (['translate', 'the', 'dog', 'sees', 'a', 'cat'], 'sentences of one word each. Put one sentence in quotes: '
     'annotated-transformer translate "the dog sees a cat"'),
    (['translate', '--model', 'MODEL', 'the', 'dog'], 'translate --model MODEL "the dog"'),
    (['translate', 'MODEL', 'the', 'dog'], 'MODEL is a folder, not a sentence: annotated-transformer translate --model MODEL "the dog"'),
    (['translate', 'runs/mien', 'the dog'],
     'neither a sentence nor an existing folder: annotated-transformer translate --model FOLDER "the dog"'),
    (['translate', 'TABLE'], 'TABLE is a file, not a sentence: annotated-transformer translate --input TABLE'),
    (['translate', '--input', 'TABLE'], 'TABLE is a table, with tabs in its lines: name the column to translate, for example --column 1'),
    (['translate', '--column', 1, 'The dog sleeps.'], '--column 1 chooses a column of a table, but sentences are given'),
    (['translate', '--column', 0, '--input', 'TABLE'], '--column 0 must be at least 1, which is the first column'),
    (['translate', '--model'], '--model needs a value'),
    (['attention'], 'the sentence is missing. Example: annotated-transformer attention'),
    (['attention', 'the', 'dog'], 'annotated-transformer attention "the dog"'),
    (['attention', 'The dog sleeps.', 'The cat sleeps.'], '2 sentences are given, but attention shows one'),
    (['attention', 'MODEL', 'The dog'], 'attention --model MODEL "The dog"'),
    (['evaluate', 'MODEL'], 'did you mean --model MODEL?'),
    (['evaluate', 'TABLE'], 'did you mean --tsv TABLE?'),
    (['serve', 'MODEL'], 'did you mean --model MODEL?'),
    (['train', 'MODEL'], 'did you mean --out MODEL?'),
    (['train', 'mine.csv'], 'did you mean --tsv mine.csv?'),
    (['train', '--tsv'], '--tsv needs a file: --tsv PATH'),
    (['train', '--languages', 'en-fr'], 'did you mean --pair?'),
    (['average'], 'RUN is missing (folder of a training run). Example: annotated-transformer average runs/mine'),
    (['average', '--model', 'MODEL'], 'RUN is written without --model'),
    (['average', '--run', 'MODEL'], 'RUN is written without --run'),
    (['export', 'MODEL', '--to', 'marian', '--out', 'x'], "--model is missing (a model's folder)"),
    (['export'], '--model, --to and --out are missing. Example: annotated-transformer export --model runs/mine --to'),
    (['export', '--model', 'MODEL', '--to', 'marian'], '--out is missing (new folder). Example:'),
])
def test_what_was_meant_is_shown(fails, tmp_path, args, message):
    table = write_tsv(tmp_path / 'pairs.tsv')
    def named(text):
        return re.sub(r'(?<![\w-])MODEL(?! is written|,)', str(SHIPPED), text.replace('TABLE', str(table)))
    message = named(message)
    assert message in fails(*[named(str(arg)) for arg in args])


def test_sentences_that_look_odd_are_translated(run):
    for texts in (['Hello'], ['and/or'], ['The dog sleeps.', 'Hello'], ['猫が眠る。', '犬が眠る。'], ['naïve']):
        assert run('translate', *texts).out.count('\n') == len(texts)


@pytest.mark.parametrize('texts, has_spaces', [
    (['고양이가', '잔다'], True), (['კატას', 'სძინავს'], True), (['ድመቷ', 'ተኝታለች'], True), (['γάτα', 'κοιμάται'], True),
    (['แมวนอน', 'หมานอน'], False), (['ឆ្មា', 'ឆ្កែ'], False), (['ねこ', 'いぬ'], False), (['猫睡觉。', '狗睡觉。'], False)])
def test_words_without_quotes_are_refused_in_scripts_with_spaces(texts, has_spaces):
    refused = False
    try:
        check_sentences(tuple(texts), 'translate', None)
    except ValueError as error:
        refused = 'sentences of one word each' in str(error)
    assert refused == has_spaces


def test_an_argument_with_line_breaks_gives_lines(run):
    out = run('translate', 'The cat sleeps.\n\nThe dog sleeps.\r\n', 'The man sleeps.').out
    assert out == 'Die Katze schläft.\n\nDer Hund schläft.\nDer Mann schläft.\n'


def test_a_column_of_a_table_is_translated(tmp_path, monkeypatch, run, fails):
    source = tmp_path / 'x.tsv'
    source.write_text('1\tThe cat sleeps.\t-\n\n2\tThe dog sleeps.\n3\n')
    args = ['translate', '--column', 2]
    printed = run(*args, '--input', source, '--output', tmp_path / 'out.txt')
    assert (tmp_path / 'out.txt').read_text() == 'Die Katze schläft.\n\nDer Hund schläft.\n\n'
    assert '1 row of the input has no column 2 (the first is line 4): the translation is empty' in printed.err
    assert 'line 2: 1 column, so there is no column 2' in fails(*args, '--input', source, '--on-error', 'stop')
    monkeypatch.setattr(sys, 'stdin', Pipe(source.read_bytes()))
    assert run(*args).out == (tmp_path / 'out.txt').read_text()
    monkeypatch.setattr(sys, 'stdin', Pipe(b'The cat sleeps.\nThe dog.\tDer Hund.\n')) # a pipe is not read ahead
    assert '1 line of the input has tabs (the first is line 2): to translate one column of a table, use --column' in run('translate').err


@pytest.mark.parametrize('data', ['', '\n \n'])
def test_an_empty_input_is_noticed(data, tmp_path, monkeypatch, run):
    (tmp_path / 'in.txt').write_text(data)
    monkeypatch.setattr(sys, 'stdin', Pipe(data.encode()))
    for args in (['--input', tmp_path / 'in.txt'], [], ['--split-sentences'], [data]):
        assert 'nothing was translated: the input has no text' in run('translate', *args).err
    assert 'nothing was' not in run('translate', 'The cat sleeps.').err


def test_the_toy_model_is_announced(trained, run):
    for args in (['translate'], ['evaluate', '--split', 'val', '--samples', 0]):
        args = [*args, *['The cat sleeps.'] * (args[0] == 'translate'), '--max-extra-tokens', 1, '--beam-size', 1]
        assert 'No --model: using the bundled toy English-German model' in run(*args).err
        assert 'No --model' not in run(*args[:1], '--model', trained, *[arg for arg in args[1:] if arg not in ('--split', 'val')]).err


# second trial, point 5
@pytest.mark.parametrize('name, signature', [
    ('a.png', b'\x89PNG'), ('a.svg', b'<?xml'), ('a.PDF', b'%PDF'), ('a.html', b'<!DOCTYPE html>')])
def test_the_ending_decides_what_attention_writes(tmp_path, run, name, signature):
    path = tmp_path / name
    run('attention', 'The cat sleeps.', '--output', path, '--translation', 'Die Katze schläft.')
    assert path.read_bytes().lstrip().lower().startswith(signature.lower())
    assert [other.name for other in tmp_path.iterdir()] == [name]


def test_a_picture_shows_the_translation_that_is_given(tmp_path, run):
    for name, translation in (('a', 'Die Katze schläft.'), ('b', 'Der Hund schläft.')):
        run('attention', 'The cat sleeps.', '--output', tmp_path / f'{name}.svg', '--translation', translation)
    texts = [re.sub(r'<dc:date>.*|id="[^"]*"|#\w+', '', (tmp_path / f'{name}.svg').read_text()) for name in 'ab']
    assert texts[0] != texts[1]


def test_attention_refuses_other_endings(tmp_path, fails):
    for name in ('a.jpg', 'a'):
        assert f'{name} must end in .html, .png, .svg, .pdf' in fails('attention', 'The cat sleeps.', '--output', tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_demo(tmp_path, monkeypatch, run):
    splits = {split: load_corpus('toy-ende')[split][:20] for split in ('test', 'test_long', 'test_combinations')}
    runs = []
    monkeypatch.setattr(train_command, 'train', lambda run, *args, **options: runs.append(run) or Translator.load())
    monkeypatch.setattr(train_command, 'load_corpus', lambda config: splits)
    monkeypatch.setattr(train_command, 'phenomenon_scores', lambda split, translations: {'negation': score(['a b'], ['a b'])})
    text = run('demo', '--out', tmp_path).out
    assert all(f'\n{split}: BLEU ' in text for split in splits) and 'negation' in text
    assert (tmp_path / 'attention.png').stat().st_size > 10_000
    assert runs[0].training.max_epochs == 6 # the recipe has 8: four minutes on two cores


def test_export_and_import(trained, tmp_path, fails, run):
    message = fails('export', '--model', trained, '--to', 'marian', '--out', tmp_path / 'x')
    assert "kind='relative' with positions='rotary': Marian can only represent transformer" in message
    assert message.endswith('for Marian, train one with --norm post --positions sinusoidal')
    assert 'nothing' in fails('import-marian', tmp_path / 'nothing', '--out', tmp_path / 'y')
    assert not (tmp_path / 'y').exists()
    assert '--quantization int8' in fails('export', '--model', SHIPPED, '--to', 'marian', '--out', tmp_path / 'x', '--quantization', 'int8')
    run('export', '--model', SHIPPED, '--to', 'marian', '--out', tmp_path / 'marian')
    assert (tmp_path / 'marian/config.json').is_file()


# second trial, point 7
def test_help_says_what_marian_needs_and_such_a_model_is_exported(tmp_path, run, fails, capsys):
    text = helped(capsys, 'export')
    assert 'trained with --norm post --positions sinusoidal' in text
    assert 'cannot represent recurrent models, ALiBi positions, pruned heads, or --d-k and --d-v' in text
    assert helped(capsys, 'train', '--tsv', 'x.tsv').lower().count('for export to marian') == 2
    args = ['train', '--tsv', write_tsv(tmp_path / 'pairs.tsv'), '--pair', 'en-de', *SMALL, '--max-steps', 2]
    run(*args, '--out', tmp_path / 'a', '--norm', 'post', '--positions', 'sinusoidal')
    run('export', '--model', tmp_path / 'a', '--to', 'marian', '--out', tmp_path / 'marian')
    assert (tmp_path / 'marian/model.safetensors').is_file()
    run(*args, '--out', tmp_path / 'b', '--architecture', 'recurrent')
    message = fails('export', '--model', tmp_path / 'b', '--to', 'marian', '--out', tmp_path / 'x')
    assert message.endswith('train one with --architecture transformer --norm post --positions sinusoidal')


def test_several_tables_train_one_model(tmp_path, run, fails):
    tables = [write_tsv(tmp_path / 'a.tsv', PAIRS[:20]), write_tsv(tmp_path / 'b.tsv', PAIRS[20:])]
    args = ['train', '--tsv', *tables, '--out', tmp_path / 'run', *SMALL]
    assert 'data        44 pairs' in run(*args).out # of 60, 8 and 8 of them held out
    assert 'already finished' in run(*args).out
    moved = tables[0].rename(tmp_path / 'moved.tsv')
    assert 'already finished' in run('train', '--tsv', moved, tables[1], '--out', tmp_path / 'run', *SMALL).out
    assert 'other settings' in fails('train', '--tsv', moved, '--out', tmp_path / 'run', *SMALL)
    swapped = fails('train', '--tsv', tables[1], moved, '--out', tmp_path / 'run', *SMALL)
    assert f'b.tsv is not {moved}' in swapped and f'moved.tsv is not {tables[1]}' in swapped
    run('train', '--config', tmp_path / 'run/run.json', '--save-config', tmp_path / 'settings.json')
    assert json.loads((tmp_path / 'settings.json').read_text())['tsv'] == [str(moved), str(tables[1])]
    assert '--src names 2, --tgt names 1: give one file of --tgt for each file of --src' in fails('train', '--src', 'a', 'b', '--tgt', 'c')


# --- serve

def test_options_of_serve_reach_the_server(monkeypatch, run):
    served = []
    monkeypatch.setattr(model_commands, 'serve', lambda translator, config, on_start: served.append((translator, config)))
    run('serve', '--host', '0.0.0.0', '--port', 0, '--api-key', 'secret', '--max-batch', 8, '--max-waiting', 9,
        '--max-sentences', 7, '--max-bytes', 500, '--timeout', 2.5, '--max-wait', 0.5, '--device', 'cpu')
    translator, config = served[0]
    assert config == ServerConfig('0.0.0.0', 0, 'secret', 8, 0.5, 9, 7, 500, 2.5)
    assert translator.device.type == 'cpu'


@pytest.fixture
def served(monkeypatch):
    "The translators that `serve` would serve."
    translators = []
    monkeypatch.setattr(model_commands, 'serve', lambda translator, config, on_start: translators.append(translator))
    return translators


def test_serve_searches_as_translate_does(run, served):
    options = '--beam-size 2 --length-penalty 1.5 --beam-patience 0.5 --device cpu'.split()
    text = 'The father does not read a school book when he is hungry.'
    run('serve', *options)
    assert served[0].decoding == DecodingConfig(2, 1.5, patience=0.5)
    translation = served[0].translate(text)
    assert translation + '\n' == run('translate', *options, text).out
    assert translation != Translator.load(device='cpu').translate(text)


def test_serve_searches_with_the_settings_of_the_model_unless_told_otherwise(tmp_path, run, served, capsys):
    model = shutil.copytree(SHIPPED, tmp_path / 'model')
    own = {'beam_size': 7, 'length_penalty': 2.0, 'n_best': 3, 'patience': 2.0}
    (model / 'training.json').write_text(json.dumps({'decoding': own}))
    before = hashes(model)
    run('serve', '--model', model, '--device', 'cpu', '--engine', 'pytorch')
    run('serve', '--model', model, '--device', 'cpu', '--engine', 'pytorch', '--beam-size', 2)
    expected = DecodingConfig(7, 2.0, patience=2.0)
    assert [translator.decoding for translator in served] == [expected, replace(expected, beam_size=2)]
    assert hashes(model) == before
    (tmp_path / 'c.json').write_text('{"beam_size": 3, "beam_patience": 1}')
    assert parse(['serve', '--config', str(tmp_path / 'c.json'), '--model', str(model)]).decoding == DecodingConfig(
        3, 2.0, patience=1.0)
    text = helped(capsys, 'serve', '--model', str(model))
    group = text[text.index('search options'):text.index('limit options')]
    for option, default in (('--beam-size', 7), ('--length-penalty', 2.0), ('--beam-patience', 2.0)):
        own_help = re.search(rf'{option} (INT|NUMBER) (.*?)(--[a-z-]+ (INT|NUMBER) |$)', group, re.DOTALL)[2]
        assert own_help.rstrip(' \n-').endswith(f'(default: {default})'), group


def test_serve_stops_a_search_as_ctranslate2_does_unless_told_otherwise(monkeypatch, run, served, capsys):
    run('serve', '--device', 'cpu')
    run('serve', '--device', 'cpu', '--beam-patience', 'inf')
    assert [translator.decoding.patience for translator in served] == [1.0, None]
    group = helped(capsys, 'serve').split('--beam-patience NUMBER')[1]
    assert 'inf: when no active one can win' in ' '.join(group.replace('│', ' ').split()) and '(default: 1.0)' in group
    monkeypatch.setattr(model_commands, 'serve', lambda translator, config, on_start: on_start('http://here'))
    line = 'Translating en to de at http://here. {}Press Ctrl-C to stop.\n'
    early = 'A search stops when --beam-patience 1 times --beam-size 4 hypotheses have finished (inf: when no active one can win). '
    assert run('serve', '--device', 'cpu').out == line.format(early)
    exact = 'A search stops when no active hypothesis can win. '
    assert run('serve', '--device', 'cpu', '--beam-patience', 'inf').out == line.format(exact)
    assert run('serve', '--device', 'cpu', '--beam-size', 1).out == line.format('')


@pytest.mark.parametrize('command', [['translate', 'hello'], ['evaluate'], ['serve']])
def test_an_infinite_patience_removes_that_of_the_model(tmp_path, command, run):
    model = shutil.copytree(SHIPPED, tmp_path / 'model')
    (model / 'training.json').write_text(json.dumps({'decoding': {'patience': 2.0}}))
    command = [*command, '--model', str(model)]
    assert parse(command).decoding.patience == 2.0
    assert parse([*command, '--beam-patience', 'inf']).decoding.patience is None
    run(*command, '--beam-patience', 'inf', '--save-config', tmp_path / 'c.json')
    assert parse([*command, '--config', str(tmp_path / 'c.json')]).decoding.patience is None


def test_search_options_of_serve_are_those_of_translate():
    ours, theirs = model_commands.Serve.options({}), Translate.options({})
    assert 'n_best' not in ours
    assert ours.pop('beam_patience').default == 1.0 and theirs['beam_patience'].default is None
    for name in ('beam_size', *SEARCH[1][:-1]):
        assert ours[name] == theirs[name]


@pytest.mark.parametrize('options', [
    '--beam-size 0', '--beam-size 1001', '--beam-size x', '--length-penalty -1', '--length-penalty 400',
    '--beam-patience 0', '--beam-patience x', '--min-length 600', '--beam 2', '--patience 1'])
def test_serve_refuses_search_settings_as_translate_does(fails, served, options):
    expected = fails('translate', *options.split(), 'hello')
    assert fails('serve', *options.split()).split(' Example: ')[0] == expected.split(' Example: ')[0]
    assert served == []


def test_serve_refuses_limits_and_ports_in_one_line(fails):
    assert '--max-batch 0 must be at least 1' in fails('serve', '--max-batch', 0)
    with socket.create_server(('127.0.0.1', 0)) as other:
        pytest.importorskip('uvicorn', reason='the extra `serve` is not installed')
        port = other.getsockname()[1]
        assert f'--port {port} of host 127.0.0.1 cannot be used' in fails('serve', '--port', port)


def test_serve_without_its_extra_says_what_to_install(monkeypatch, fails):
    monkeypatch.setitem(sys.modules, 'uvicorn', None)
    assert "serving needs uvicorn: pip install 'annotated_transformer[serve]'" in fails('serve', '--port', 0)


@pytest.mark.parametrize('length', range(40, 120, 4))
def test_a_long_path_is_not_broken_in_a_message(fails, length):
    path = 'x' * length + '.tsv'
    assert f'did you mean --tsv {path}?' in fails('evaluate', path)
