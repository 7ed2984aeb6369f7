"The front page promises nothing that is not there: its examples run, and its numbers are those of the records."
import json
import re
import shlex
import shutil
import statistics
from configparser import ConfigParser
from pathlib import Path

from annotated_transformer.experiments import t_interval

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')


def blocks(language):
    "The code blocks of a language."
    return re.findall(rf'^```{language}\n(.*?)^```', README, re.M | re.S)


def record(name):
    return json.loads((ROOT / 'benchmarks' / 'results' / f'{name}.json').read_text(encoding='utf-8'))


def rows(task):
    "The cells of a task in the table of results, once for each test set."
    (line,) = [line for line in README.splitlines() if line.startswith(f'| {task} |')]
    cells = [cell.strip().split('<br>') for cell in line.strip('|').split('|')]
    return [[cell[i] if len(cell) > 1 else cell[0] for cell in cells] for i in range(len(cells[1]))]


def test_python_example_gives_the_output_that_is_shown():
    (source,) = blocks('python')
    *statements, expression = source.strip().splitlines()
    names = {}
    exec('\n'.join(statements), names)
    assert repr(eval(expression, names)) in README


def test_commands_exist():
    from annotated_transformer.cli import parse
    lines = [line for block in blocks('sh') for line in block.splitlines() if line.startswith('annotated-transformer')]
    assert {line.split()[1] for line in lines} >= {'train', 'evaluate', 'translate'}
    for line in lines:
        parse(shlex.split(line)[1:])


# point 13 of the trial of 0.1.0
def test_commands_of_the_guide_exist(tmp_path, monkeypatch):
    from annotated_transformer.cli import parse
    from annotated_transformer.translator import SHIPPED
    for name in 'first', 'toy': # to start from
        shutil.copytree(SHIPPED, tmp_path / 'runs' / name)
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / 'nbs/34_your_own_data.ipynb').read_text(encoding='utf-8'))['cells']
    text = '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown')
    shell = ''.join(re.findall(r'^```sh\n(.*?)^```', text, re.M | re.S)).replace('\\\n', ' ')
    commands = [line for line in shell.splitlines() if line.startswith('annotated-transformer')]
    assert {line.split()[1] for line in commands} >= {'train', 'evaluate', 'translate', 'export', 'serve'}
    for line in commands:
        parse(shlex.split(line)[1:])


# point 9 of the trial of 0.1.0
def test_your_own_data_is_on_the_front_page():
    assert any(re.search(r'train --tsv pairs.tsv --pair', block) for block in blocks('sh'))
    assert '(nbs/34_your_own_data.ipynb)' in README


def test_results_are_those_of_the_records():
    rows_of_seeds = {'Multi30k EN-DE': ['multi30k-en-de', 'multi30k-en-de-seed2', 'multi30k-en-de-seed3']}
    for task, name in {'EN-DE, wider, R-Drop': 'gpu-en-de-wide', 'DE-EN': 'gpu-de-en', 'EN-FR': 'gpu-en-fr'}.items():
        rows_of_seeds[f'Multi30k {task}'] = [f'{name}-seed{seed}' for seed in (1, 2, 3)]
    for task, names in rows_of_seeds.items():
        found = [record(name) for name in names]
        assert [each['seed'] for each in found] == [1, 2, 3]
        assert {cells[1].strip('`') for cells in rows(task)} == found[0]['scores'].keys() - {'val'} # all, always
        on_gpu = 'NVIDIA H200' in found[0]['versions']['device']
        minutes = statistics.mean(each['metrics']['training_minutes'] for each in found)
        for cells in rows(task):
            scores = [each['scores'][cells[1].strip('`')] for each in found]
            bleus = [score['bleu'] for score in scores]
            over_sentences = statistics.mean(score['bleu_half_width'] for score in scores)
            half_width = 4.3027 * statistics.stdev(bleus) / 3 ** 0.5 # Student's, two degrees of freedom
            assert cells[2:5] == [f'{statistics.mean(bleus):.2f}', f'± {half_width:.1f} (3 seeds)',
                                  f'± {over_sentences:.1f}']
            assert cells[5] == f"{statistics.mean(score['chrf'] for score in scores):.1f}"
            assert cells[6] == f"{found[0]['metrics']['parameters']:,}"
            assert cells[7] == f"{minutes:.0f}, {'H200' if on_gpu else 'CPU'}"
            assert re.findall(r'/(\S+)\.json', cells[8]) == [f'results/{name}' for name in names]
    (cells,) = rows('toy EN-DE (`make demo`)')
    name = 'toy-en-de-demo'
    assert cells[2] == f"{record(name)['scores']['test']['bleu']:.2f}"
    assert cells[3] == '–'
    assert cells[5] == f"{record(name)['scores']['test']['chrf']:.1f}"
    assert cells[8] == f'[{name}](benchmarks/results/{name}.json)'


def test_sentence_on_tokenized_text_has_the_scores_of_the_records():
    found = [record(f'gpu-tok-r-drop-seed{seed}') for seed in (1, 2, 3)]
    bleus = [each['scores']['test']['lowercased_tokenized_bleu'] for each in found]
    low, high = t_interval(bleus)
    text = ' '.join(README.split())
    assert f'reaches {statistics.mean(bleus):.2f} ± {(high - low) / 2:.1f} (3 seeds; we [knew]' in text
    assert {each['metrics']['parameters'] for each in found} == {record('multi30k-en-de')['metrics']['parameters']}
    assert {each['note'].split()[0] for each in found} == {'15'} and 'Fifteen models shared the H200' in text


def test_results_have_five_rows():
    section = README.split('## Results')[1].split('\n## ')[0]
    assert len(re.findall(r'^\|', section, re.M)) == 2 + 5                 # the first two are the header
    assert 'results.html), each with its command' in README


def test_what_is_special_names_the_live_model():
    assert 'in your browser' in README.split('## What is special')[1].split('##')[0]


def test_readme_is_short():
    "All words, those of code and tables too, but no addresses of links and no tags."
    assert len(re.findall(r"[A-Za-z][\w'-]*", re.sub(r'\]\([^)]*\)|<br>', '] ', README))) <= 700


def test_links_lead_to_files():
    links = [link for link in re.findall(r'\]\(([^)\s]+)\)', README) if not link.startswith('https://')]
    assert len(links) >= 10
    assert [link for link in links if not (ROOT / link.split('#')[0]).exists()] == []


def test_citation_is_of_this_version():
    config = ConfigParser()
    config.read(ROOT / 'settings.ini', encoding='utf-8')
    cfg = config['DEFAULT']
    citation = (ROOT / 'CITATION.cff').read_text(encoding='utf-8').splitlines()
    assert f"version: {cfg['version']}" in citation
    assert f"repository-code: {cfg['git_url']}" in citation
    assert f"title: {cfg['title']}" in citation
