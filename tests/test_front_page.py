"The examples of the front page are run and its figures looked up, so that it cannot promise what is not there."
import json
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT/'README.md').read_text(encoding='utf-8')


def blocks(language): return re.findall(rf'^```{language}\n(.*?)^```', README, re.M | re.S)


def test_python_examples_run(tmp_path, monkeypatch):
    "In an empty folder: nothing need have been trained."
    monkeypatch.chdir(tmp_path)
    found = blocks('python')
    assert found
    for source in found: exec(compile(source, 'README.md', 'exec'), {})
    assert (tmp_path/'attention.html').is_file()


def test_commands_exist():
    from annotated_transformer.v1.cli import parse
    lines = [line for block in blocks('sh') for line in block.splitlines() if line.startswith('annotated-transformer')]
    assert {line.split()[1] for line in lines} >= {'train', 'evaluate', 'translate'}
    for line in lines: parse(shlex.split(line)[1:])


def rows(name):
    "The cells of every row of a table that begins with `name`."
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in README.splitlines()
            if line.startswith(f'| {name} |')]


def record(name): return json.loads((ROOT/'benchmarks'/'results'/f'{name}.json').read_text(encoding='utf-8'))


def test_every_score_is_that_of_its_record():
    scored = [path.stem for path in (ROOT/'benchmarks'/'results').glob('*.json') if record(path.stem).get('scores')]
    assert 'multi30k-en-de' in scored
    for name in scored:
        *shown, made = rows(name)
        assert [cells[1].strip('`') for cells in shown] == list(record(name)['scores'])
        for cells, found in zip(shown, record(name)['scores'].values()):
            wanted = [f'{found[kind]:.2f}' if kind in found else '–'
                      for kind in ('bleu', 'chrf', 'lowercased_tokenized_bleu')]
            assert [cell.split(' ± ')[0] for cell in cells[2:5]] == wanted
            assert cells[5] == str(found['sentences'])
        assert record(name)['command'] in made[1] and made[-1] == record(name)['date']


def test_the_headline_is_of_the_runs_that_val_chose():
    found = re.findall(r'\*\*([\d.]+) ± [\d.]+\*\*.*?`(multi30k-[\w-]+)`', README)
    kinds = {'bleu': 'multi30k-en-de', 'lowercased_tokenized_bleu': 'multi30k-tok-en-de'}
    for (shown, name), (score, runs) in zip(found, kinds.items(), strict=True):
        val = {path.stem: record(path.stem)['scores']['val'][score]
               for path in (ROOT/'benchmarks'/'results').glob(f'{runs}*.json')}
        assert name == max(val, key=val.get)
        scores = record(name)['scores']
        assert shown == f"{scores.get('test_2016_flickr', scores.get('test'))[score]:.2f}"


def test_every_speed_is_that_of_its_record():
    for size, found in record('train-speed')['metrics'].items():
        (cells,) = rows(size)
        assert cells[1:4:2] == [f"{found['tokens_per_second'][name]:,}" for name in ('annotated_transformer', cells[2])]
        assert float(cells[4]) == round(found['speedup'], 2)
    ((_, *engines),) = rows('search')
    for search, found in record('decode-speed')['metrics']['speed'].items():
        ((_, *cells),) = rows(search)
        assert found.keys() <= set(engines)
        assert cells == [f"{found[name]['tokens_per_second']:,}" if name in found else '–' for name in engines]
