"""The command line as its users meet it: what goes wrong is one line and exit code 2,
and what was there stays as it was."""
import gzip, hashlib, json, os, re, resource, shutil, signal, subprocess, sys, time, warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest, torch

from annotated_transformer.v1 import cli
from annotated_transformer.v1.cli import main, parse
from annotated_transformer.v1.corpora import load_corpus
from annotated_transformer.v1.decoding import DecodingConfig
from annotated_transformer.v1.scoring import lowercased_tokenized, lowercased_tokenized_bleu, report, score
from annotated_transformer.v1.training import Interrupted
from annotated_transformer.v1.transformer import Transformer
from annotated_transformer.v1.translator import Translator

SMALL = ('--max-steps 40 --save-every 20 --d-model 32 --d-ff 64 --n-layers 1 '
         '--vocab-size 300 --max-tokens 512 --max-len 40').split()
COMMAND = [sys.executable, '-c', 'from annotated_transformer.v1.cli import main; main()']
PAIRS = [(f'the {noun} {verb}s .', f'{noun.upper()} {verb} t !')
         for noun in 'dog cat fox hen cow'.split() for verb in 'run eat sing'.split()] * 6


def write(folder, src, tgt):
    "Two parallel files, and the flags that name them."
    for name, lines in (('s.txt', src), ('t.txt', tgt)):
        (folder / name).write_bytes(b''.join(
            line.encode() + b'\n' if isinstance(line, str) else line + b'\n' for line in lines))
    return ['--corpus', 'files', '--src', str(folder / 's.txt'), '--tgt', str(folder / 't.txt')]

def start(args, out=subprocess.DEVNULL, **options):
    "The same command line in a process of its own."
    return subprocess.Popen([*COMMAND, *map(str, args)], stdout=out, stderr=subprocess.PIPE, text=True, **options)

def files_of(folder):
    "Every file below a folder with a hash of what it holds."
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(Path(folder).rglob('*')) if p.is_file()}

@pytest.fixture
def fails(capsys):
    "Run a command that must fail: exit code 2 and one line, which is returned."
    def run(*args):
        with pytest.raises(SystemExit) as stop: main([str(a) for a in args])
        lines = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 2
        assert len(lines) == 1 and lines[0].startswith('annotated-transformer: '), lines
        return lines[0]
    return run

@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    "A model trained for a moment on two small files."
    folder = tmp_path_factory.mktemp('trained')
    main(['train', *write(folder, *zip(*PAIRS)), '--out', str(folder / 'run'), *SMALL])
    return folder / 'run'


@pytest.mark.parametrize('src, tgt, words', [
    ([], [], ['s.txt', 'empty']),
    (['a b'] * 30, ['x'] * 29, ['30', '29']),
    (['a b'] * 30 + [b'caf\xe9'], ['x'] * 31, ['s.txt', '31', 'UTF-8']),
    (['a b'] * 30, ['x'] * 5 + ['nul\0'] + ['x'] * 24, ['t.txt', '6', 'NUL']),
    (['a b'] * 3 + ['bare\rreturn'] + ['a'] * 26, ['x'] * 30, ['s.txt', '4', 'carriage return']),
])
def test_broken_files(fails, tmp_path, src, tgt, words):
    out = tmp_path / 'run'
    said = fails('train', *write(tmp_path, src, tgt), '--out', out, *SMALL)
    assert all(word in said for word in words), said
    assert not out.exists()                              # nothing half-made is left

def test_tsv_with_one_column(fails, tmp_path):
    (tmp_path / 'p.tsv').write_text('a\tb\nc\td\nonly\n', encoding='utf-8')
    said = fails('train', '--corpus', 'tsv', '--tsv', tmp_path / 'p.tsv', '--out', tmp_path / 'run', *SMALL)
    assert 'p.tsv' in said and '3' in said

@pytest.mark.parametrize('flags, words', [
    ('--corpus nope', ["'nope'", 'multi30k']),
    ('--corpus multi30k --pair en-xx', ["'xx'", 'de']),
    ('--preset nope', ["'nope'", 'tiny', 'base']),
    ('--d-model 0', ['d_model=0']), ('--n-layers -2', ['n_layers=-2']),
    ('--d-model 30 --n-heads 4', ['30', 'n_heads=4']),
    ('--dropout 1.5', ['dropout=1.5']), ('--max-tokens 0', ['max_tokens=0']), ('--warmup -1', ['warmup=-1']),
    ('--vocab-size 3', ['vocab_size=3']), ('--max-minutes 0', ['max_minutes=0']), ('--norm none', ["'none'", 'post']),
    ('--d-model x', ['d-model']), ('--no-such-flag 1', ['no-such-flag']),
    ('--corpus files', ['files', 'src']), ('--corpus multi30k --data-dir no/such/folder', ['no/such/folder']),
])
def test_settings_that_cannot_be(fails, tmp_path, flags, words):
    said = fails('train', '--out', tmp_path / 'run', *flags.split())
    assert all(word in said for word in words), said
    assert not (tmp_path / 'run').exists()

def test_unknown_split_and_pair(fails, trained):
    said = fails('evaluate', '--model', trained, '--split', 'exam')
    assert "'exam'" in said and 'val' in said
    assert 'de-en' in fails('evaluate', '--model', trained, '--corpus', 'toy-ende', '--pair', 'de-en')

def test_no_model(fails, tmp_path, trained):
    assert 'is no model folder' in fails('translate', '--model', tmp_path, 'hello')
    for name in ('config.json', 'model.safetensors', 'tokenizer.json'):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps(config | {'d_ff': 128}))
    said = fails('translate', '--model', tmp_path, 'hello')
    assert 'does not fit' in said and 'model.safetensors' in said
    (tmp_path / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'tokenizer.json').write_text('{}')
    assert 'tokenizer.json' in fails('translate', '--model', tmp_path, 'hello')

def test_translates_every_line(trained, capsys, monkeypatch):
    class Stdin:
        buffer = [b'the dog runs .\n', b'\n', b'  \n', '☃ naïve\r\n'.encode(), b'the cat eats .']
        @staticmethod
        def isatty(): return False
    monkeypatch.setattr(sys, 'stdin', Stdin)
    main(['translate', '--model', str(trained)])
    lines = capsys.readouterr().out.split('\n')
    assert len(lines) == 6 and lines[1] == lines[2] == lines[5] == ''
    main(['translate', '--model', str(trained), 'the dog runs .'])
    assert capsys.readouterr().out == lines[0] + '\n'

def test_a_program_that_waits_for_each_answer(trained, fails):
    run = start(['translate', '--model', trained, '--read-ahead', '1', '--min-len', '1'],
                out=subprocess.PIPE, stdin=subprocess.PIPE)
    for line in ('the dog runs .', 'the cat eats .'):
        run.stdin.write(line + '\n')
        run.stdin.flush()
        assert run.stdout.readline().strip()
    assert run.communicate()[0] == '' and run.returncode == 0
    assert '--read-ahead 0 must be positive' in fails('translate', '--model', trained, '--read-ahead', '0')

def test_whoever_calls_main_keeps_their_warnings(trained, capsys):
    before = warnings.showwarning
    main(['translate', '--model', str(trained), 'the dog runs . ' * 50, '--max-extra', '3'])
    assert 'annotated-transformer: ' in capsys.readouterr().err and warnings.showwarning is before

def test_too_long_is_cut_and_said(trained):
    run = start(['translate', '--model', trained, 'the dog runs . ' * 50, '--max-extra', '3'], out=subprocess.PIPE)
    out, err = run.communicate()
    assert run.returncode == 0 and len(out.splitlines()) == 1
    assert len(err.splitlines()) == 1 and 'cut' in err and '39' in err

class Stdin:
    "Standard input with two lines, one of them no text."
    buffer = [b'the dog runs .\n', b'\xff\xfe\n', b'the cat eats .\n']
    @staticmethod
    def isatty(): return False

def test_stdin_that_is_no_text(fails, trained, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'stdin', Stdin)
    main(['translate', '--model', str(trained), '--min-len', '1'])
    out, err = capsys.readouterr()
    assert out.count('\n') == 3 and out.split('\n')[1] == '' != out.split('\n')[2]     # the rest is translated
    assert len(err.splitlines()) == 1 and '1 of 3 lines' in err and 'line 2: not UTF-8' in err
    assert 'line 2' in fails('translate', '--model', trained, '--on-error', 'raise')

def test_a_file_becomes_a_file(fails, trained, tmp_path, capsys):
    source, out = tmp_path / 'in.txt', tmp_path / 'out.txt'
    source.write_bytes(b'the dog runs .\n\nthe cat eats .')
    main(['translate', '--model', str(trained), '--input', str(source), '--output', str(out), '--prefix', 'DOG'])
    lines = out.read_text(encoding='utf-8').split('\n')
    assert len(lines) == 4 and lines[0].startswith('DOG') and lines[1] == lines[3] == ''
    assert '3/3' in capsys.readouterr().err                # the bar knows how many lines there are
    (packed := tmp_path / 'in.txt.gz').write_bytes(gzip.compress(source.read_bytes()))
    main(['translate', '--model', str(trained), '--input', str(packed), '--prefix', 'DOG'])
    assert capsys.readouterr().out.split('\n') == lines
    main(['translate', '--model', str(trained), '--input', str(packed), '--prefix', 'DOG',
          '--output', str(tmp_path / 'out.gz')])
    assert gzip.decompress((tmp_path / 'out.gz').read_bytes()) == out.read_bytes()
    capsys.readouterr()
    packed.write_bytes(packed.read_bytes()[:-5])
    assert 'in.txt.gz is no whole gzip file' in fails('translate', '--model', trained, '--input', packed)
    packed.unlink(), (tmp_path / 'out.gz').unlink()
    source.write_bytes(b'fine\n\xff\n')
    with pytest.raises(SystemExit):
        main(['translate', '--model', str(trained), '--input', str(source), '--output', str(out),
              '--on-error', 'raise'])
    assert 'line 2: not UTF-8' in capsys.readouterr().err.splitlines()[-1]
    assert (out.read_text(encoding='utf-8').split('\n') == lines
            and sorted(p.name for p in tmp_path.iterdir()) == ['in.txt', 'out.txt'])
    assert 'not both' in fails('translate', '--model', trained, '--input', source, 'hello')
    assert 'absent.txt' in fails('translate', '--model', trained, '--input', tmp_path / 'absent.txt')
    assert str(tmp_path / 'no/out.txt') in fails(
        'translate', '--model', trained, '--input', source, '--output', tmp_path / 'no/out.txt')

def test_killed_while_writing_leaves_no_file(trained, tmp_path):
    (tmp_path / 'in.txt').write_text('the dog runs .\n' * 200_000)
    run = start(['translate', '--model', trained, '--input', tmp_path / 'in.txt', '--output', tmp_path / 'out.txt'])
    while not list(tmp_path.glob('.*.tmp')): time.sleep(0.05); assert run.poll() is None
    run.send_signal(signal.SIGINT)
    run.communicate()
    assert run.returncode == 130 and [p.name for p in tmp_path.iterdir()] == ['in.txt']

def test_every_decoding_setting_is_a_flag(trained, capsys, fails):
    main(['translate', '--model', str(trained), '--n-best', '2', '--beam-size', '3', '--alpha', '1',
          '--length-offset', '0', '--min-len', '1', '--no-repeat-ngram', '2', '--max-extra', '9',
          'the dog runs .', ''])
    rows = [line.split('\t') for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ['1', '1', '2'] and float(rows[0][1]) >= float(rows[1][1])
    other = DecodingConfig(3, 1., 0., 9, 1, 2, 2, 1.)
    assert all(value != getattr(DecodingConfig(), name) for name, value in asdict(other).items())
    flags = [part for name, value in asdict(other).items() for part in ('--' + name.replace('_', '-'), str(value))]
    assert parse(['translate', '--model', str(trained), *flags]).decoding == other
    assert 'leave --n-best out' in fails('evaluate', '--model', trained, '--n-best', '2')
    assert 'n_best=5' in fails('translate', '--model', trained, '--n-best', '5', 'hello')

def test_a_models_own_decoding_settings_are_the_defaults(trained, tmp_path, capsys, fails):
    for name in ('config.json', 'model.safetensors', 'tokenizer.json'):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    about = json.loads((trained / 'training.json').read_text())
    (tmp_path / 'training.json').write_text(json.dumps(about | dict(decoding=dict(beam_size=1, alpha=1.5))))
    with pytest.raises(SystemExit): main(['translate', '--model', str(tmp_path), '--help'])
    said = re.sub(r'[│\s]+', ' ', capsys.readouterr().out)
    assert (re.search(r'--beam-size INT [^()]*\(default: 1\)', said)
            and re.search(r'--alpha FLOAT [^()]*\(default: 1.5\)', said))
    assert parse(['translate', '--model', str(tmp_path)]).decoding == DecodingConfig(beam_size=1, alpha=1.5)
    assert parse(['evaluate', f'--model={tmp_path}', '--alpha', '0']).decoding == DecodingConfig(beam_size=1, alpha=0.)
    (tmp_path / 'training.json').write_text(json.dumps(dict(decoding=dict(beam_size=0))))
    assert 'training.json: its "decoding"' in fails('translate', '--model', tmp_path, 'hello')
    (tmp_path / 'training.json').write_text('[]')
    assert 'training.json is damaged: it holds a list' in fails('translate', '--model', tmp_path, 'hello')

KEPT = {'bleu', 'signature', 'chrf', 'chrf_signature', 'sentences', 'seconds'}
ADDED = {'length_ratio', 'bleu_mean', 'bleu_half_width', 'bleu_interval_signature',
         'lowercased_tokenized_bleu', 'lowercased_tokenized_signature',
         'by_length', 'perplexity', 'sentences_per_second', 'tokens_per_second'}

def test_a_checkpoint_is_scored_on_what_its_run_was_trained_on(trained, fails, tmp_path):
    step = sorted((trained / 'checkpoints').iterdir())[-1]
    own, its = (parse(['evaluate', '--model', str(folder)]).corpus for folder in (trained, step))
    assert own == its and its.corpus == 'files'
    shutil.copytree(trained, tmp_path / 'run')
    for name in ('run.json', 'training.json'): (tmp_path / 'run' / name).unlink()
    assert 'tells of no corpus' in fails('evaluate', '--model', tmp_path / 'run')

def test_a_start_brings_the_sizes_of_its_model(trained):
    for flag in ('--start-from', '--start_from'):
        assert parse(['train', flag, str(trained)]).run.model == Translator.load(trained).model.config

def test_the_demo_tells_its_whole_story(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, 'train_translator', lambda *_, **__: Translator.load())
    monkeypatch.setattr(cli, 'load_corpus', lambda config: {
        split: load_corpus(config)[split][:40] for split in ('test', 'test_long', 'test_combinations')})
    monkeypatch.setattr(cli, 'phenomenon_scores', lambda split, translations: {'negation': score(['a b'], ['a b'])})
    main(['demo', '--out', str(tmp_path)])
    said = capsys.readouterr().out
    assert all(f'\n{split}: BLEU ' in said for split in ('test', 'test_long', 'test_combinations'))
    assert 'tok:13a' in said and 'negation' in said and (tmp_path / 'attention.png').stat().st_size > 10_000

def test_there_is_no_best_by_a_figure_that_was_not_measured(trained, fails):
    assert 'has no val_bleu in its log' in fails('average', trained, '--best', '--monitor', 'val_bleu')

@pytest.mark.parametrize('overwrite', [False, True])
def test_how_to_go_on_does_not_begin_anew(trained, tmp_path, monkeypatch, capsys, overwrite):
    shutil.copytree(trained, tmp_path / 'run')
    def stop(*_, **__): raise Interrupted('step 5 is saved in RUN: the same command goes on from there', 15)
    monkeypatch.setattr(cli, 'train_translator', stop)
    for command in ('train', 'demo'):
        with pytest.raises(SystemExit) as ended:
            main([command, '--out', str(tmp_path / 'run'), *['--overwrite']*overwrite])
        said = capsys.readouterr().err
        assert ended.value.code == 143 and 'step 5 is saved in RUN: the same command ' in said
        assert ('without --overwrite goes on' in said) == overwrite

def test_evaluate_prints_one_json_object(trained, capsys, tmp_path):
    main(['evaluate', '--model', str(trained), '--split', 'test', '--json', '--output', str(tmp_path / 'out.txt')])
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == KEPT | ADDED
    lines = (tmp_path / 'out.txt').read_text().splitlines()
    assert len(lines) == result['sentences'] == sum(group['sentences'] for group in result['by_length'].values()) > 0
    translator, corpus = Translator.load(trained), load_corpus(parse(['evaluate', '--model', str(trained)]).corpus)
    src, tgt = zip(*corpus['test'])
    assert (result['bleu'] == score(lines, tgt).bleu
            and result['perplexity'] == pytest.approx(translator.perplexity(src, tgt)))
    written = sum(len(translator.tokenizer.encode(line)) + 1 for line in lines)
    assert result['tokens_per_second'] * result['seconds'] == pytest.approx(written, rel=0.2, abs=2)
    assert result['tokens_per_second'] / result['sentences_per_second'] == pytest.approx(written / len(lines), rel=0.05)

def test_evaluate_says_it_in_words_and_draws_it(trained, capsys, tmp_path, fails):
    main(['evaluate', '--model', str(trained), '--split', 'test', '--samples', '50', '--plot', str(tmp_path / 'a.svg')])
    said = capsys.readouterr().out
    for words in ('files test: BLEU', 'bs:50', 'perplexity', 'target tokens a second',
                  'words of the reference', 'not to be compared with any'):
        assert said.count(words) == 1, words
    assert '<svg' in (tmp_path / 'a.svg').read_text()
    assert ('a.doc' in fails('evaluate', '--model', trained, '--plot', tmp_path / 'a.doc')
            and not (tmp_path / 'a.doc').exists())
    assert 'samples=3' in fails('evaluate', '--model', trained, '--samples', '3', '--json')

def test_any_two_files_are_compared(fails, capsys, tmp_path):
    references = [f'Der {a} {b} heute, und {c} nicht .'
                  for a in ('Hund', 'Mann') for b in ('schläft', 'isst') for c in ('sie', 'er', 'es')] * 3
    files = {'ours': [r if i % 3 else r.lower() for i, r in enumerate(references)],
             'theirs': [r.replace('heute', '') for r in references], 'refs': references,
             'cut': [r.replace('heute', 'jetzt') for r in lowercased_tokenized(references, 'de')],
             'short': references[1:]}
    for name, lines in files.items(): (tmp_path / name).write_text('\n'.join(lines) + '\n', encoding='utf-8')
    def flags(**names):
        return [str(x) for name, file in names.items()
                for x in ('--' + name.replace('_', '-'), tmp_path / file)]
    both = flags(translations='ours', references='refs')
    main(['evaluate', *both, *flags(against='theirs', tokenized_references='cut', plot='p.png'), '--json'])
    found = json.loads(capsys.readouterr().out)
    assert found == report(files['ours'], references, 'de', against=files['theirs'], tokenized_references=files['cut'])
    assert (found['lowercased_tokenized_bleu']
            == lowercased_tokenized_bleu(files['ours'], files['cut'], 'de', tokenized=True)[0] < found['bleu'])
    assert (report(files['ours'], references, 'de', 0)['lowercased_tokenized_bleu'] == pytest.approx(100)
            and found['p_value'] <= 1)
    assert (tmp_path / 'p.png').read_bytes().startswith(b'\x89PNG')
    main(['evaluate', *both, '--samples', '0', *flags(against='theirs')])
    assert 'the other system: BLEU' in (said := capsys.readouterr().out) and 'p =' not in said
    assert '35 lines' in fails('evaluate', *flags(translations='short', references='refs'))
    assert 'short has 35 lines, and there are 36' in fails('evaluate', *both, *flags(against='short'))
    assert 'absent' in fails('evaluate', *flags(translations='absent', references='refs'))
    assert 'go together' in fails('evaluate', *flags(translations='ours'))

@pytest.mark.parametrize('flags, said', [
    ('translate hello --alpha 400', 'alpha=400.0 is too large'), ('translate hello --max-tokens 0', 'max_tokens=0'),
    ('translate hello --max-extra -1', 'max_extra=-1'), ('train --max-tokens 99999999999999999999', 'too'),
    ('train --seed 99999999999999999999999', 'verflow'), ('train --r-drop inf', 'r_drop=inf')])
def test_numbers_out_of_range(fails, tmp_path, monkeypatch, flags, said):
    monkeypatch.chdir(tmp_path)
    assert said in fails(*flags.split(), *(['--out', 'r'] if 'train' in flags else []))
    assert not list(tmp_path.iterdir())

def test_a_translation_as_long_as_there_is_room_for(capsys):
    for n in 9223372036854775807, 99999999999999999999:
        main(['translate', 'The dog sleeps.', '--max-extra', str(n)])
        assert capsys.readouterr().out.strip() == 'Der Hund schläft.'

def test_other_files_are_counted_before_anything_is_translated(fails, trained, tmp_path, monkeypatch):
    (short := tmp_path / 'short').write_text('Eins .\n')
    monkeypatch.setattr(Translator, 'translate', lambda *a, **k: pytest.fail('translated all, to lose it'))
    for name in '--against', '--tokenized-references':
        assert 'short has 1 lines, and there are' in fails('evaluate', '--model', trained, name, short)

def test_a_reader_who_leaves_ends_it_as_it_ends_other_commands(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as out: process = start(['translate', 'the dog sleeps'], out)
    assert (process.communicate()[1], process.returncode) == ('', 141)

def test_toy_results_are_told_by_phenomenon(trained, tmp_path, capsys):
    translator = Translator.load(trained)
    translator.save(tmp_path)                              # its training.json does not say which corpus it is from
    (tmp_path / 'training.json').write_text('{}')
    main(['evaluate', '--model', str(tmp_path), '--corpus', 'toy-ende', '--split', 'val', '--json',
          '--beam-size', '1', '--max-extra', '1', '--samples', '0'])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == ((KEPT | ADDED | {'by_phenomenon'})
                            - {'bleu_mean', 'bleu_half_width', 'bleu_interval_signature'})
    assert len(found['by_phenomenon']) > 8 and found['sentences'] == 500

@pytest.mark.parametrize('command', ['train', 'evaluate', 'average', 'translate',
                                     'attention', 'import-marian', 'export', 'demo'])
def test_every_flag_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop: main([command, '--help'])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and command in said
    # no frame without a terminal
    flags = re.findall(r'^[│ ]*(--[a-z][\w-]*)(.*(?:\n[│ ]{12,}[^-│ ].*)*)', said, re.M)
    assert flags, said
    for flag, told in flags:
        told = re.sub(r'--no-[\w-]+|\{[^}]*\}|\((?:default|required)[^)]*\)', '', told) # nor is this an explanation
        assert re.search('[a-z]{2}', told), (flag, told)

def test_attention_is_a_page(trained, tmp_path, capsys):
    main(['attention', '--model', str(trained), '--text', 'the dog runs .', '--out', str(tmp_path / 'maps.html')])
    page = (tmp_path / 'maps.html').read_text(encoding='utf-8')
    assert '<html' in page and 'maps.html' in capsys.readouterr().out

def test_to_another_program_and_back(trained, tmp_path, capsys, fails):
    own = Translator.load(trained)
    torch.manual_seed(0)
    as_marian = replace(own.model.config, norm='post', positions='sinusoidal')
    marian = Translator(Transformer(as_marian), own.tokenizer)
    marian.save(tmp_path / 'own')
    main(['export', str(tmp_path / 'own'), '--to', 'ctranslate2', '--out', str(tmp_path / 'ct2'),
          '--quantization', 'int8'])
    assert str(tmp_path / 'ct2') in capsys.readouterr().out and (tmp_path / 'ct2/model.bin').is_file()
    main(['export', str(tmp_path / 'own'), '--to', 'marian', '--out', str(tmp_path / 'marian')])
    assert str(tmp_path / 'marian') in capsys.readouterr().out and (tmp_path / 'marian/config.json').is_file()
    assert 'float32' in fails('export', tmp_path / 'own', '--to', 'marian', '--out', tmp_path / 'x',
                              '--quantization', 'int8')
    assert ('nothing' in fails('import-marian', tmp_path / 'nothing', '--out', tmp_path / 'y')
            and not (tmp_path / 'y').exists())

def test_other_settings_are_refused_and_nothing_changes(fails, trained):
    flags = ['--corpus', 'files', '--src', trained.parent / 's.txt', '--tgt', trained.parent / 't.txt',
             '--out', trained, *SMALL]
    before = files_of(trained)
    said = fails('train', *flags, '--warmup', '9')
    assert 'warmup' in said and '9 here' in said and '--overwrite' in said
    assert files_of(trained) == before
    main(['train', *map(str, flags)])                    # the same settings: finished, nothing to do
    assert files_of(trained) == before

def test_a_stranger_folder_is_not_touched(fails, tmp_path):
    (tmp_path / 'thesis.txt').write_text('mine')
    assert 'holds no run' in fails('train', *write(tmp_path, *zip(*PAIRS)), '--out', tmp_path, *SMALL)
    assert (tmp_path / 'thesis.txt').read_text() == 'mine'


def test_killed_and_resumed_ends_the_same(tmp_path):
    flags = [*write(tmp_path, *zip(*PAIRS)), *SMALL, '--max-steps', '400']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    assert start(['train', *flags, '--out', whole]).wait() == 0
    run = start(['train', *flags, '--out', killed])
    while not list(killed.glob('checkpoints/step-*0')): time.sleep(0.01); assert run.poll() is None
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (killed / 'training.json').exists()
    assert start(['train', *flags, '--out', killed]).wait() == 0
    assert (whole / 'model.safetensors').read_bytes() == (killed / 'model.safetensors').read_bytes()

def test_no_room_on_the_disk(tmp_path):
    flags = [*write(tmp_path, *zip(*PAIRS)), '--out', tmp_path / 'run', *SMALL, '--max-steps', '200']
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))   # the weights are larger
    run = start(['train', *flags], preexec_fn=limit)
    said = run.communicate()[1].strip().splitlines()[-1]
    assert run.returncode == 2 and said.startswith('annotated-transformer: ') and 'model.safetensors' in said, said
    assert not list((tmp_path / 'run').rglob('*.safetensors'))
    assert start(['train', *flags]).wait() == 0          # with room again, the same command goes on
