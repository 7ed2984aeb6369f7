"The examples of the front page are run, so that it cannot promise what is not there."
import re
import shlex
from pathlib import Path

README = (Path(__file__).resolve().parents[1]/'README.md').read_text(encoding='utf-8')


def blocks(language): return re.findall(rf'^```{language}\n(.*?)^```', README, re.M | re.S)


def test_python_examples_run(tmp_path, monkeypatch):
    "In an empty folder: nothing need have been trained."
    monkeypatch.chdir(tmp_path)
    found = blocks('python')
    assert found
    for source in found: exec(compile(source, 'README.md', 'exec'), {})
    assert (tmp_path/'attention.html').is_file()


def test_commands_exist():
    from annotated_transformer.cli import parse
    lines = [line for block in blocks('sh') for line in block.splitlines() if line.startswith('annotated-transformer')]
    assert {line.split()[1] for line in lines} >= {'train', 'evaluate', 'translate'}
    for line in lines: parse(shlex.split(line)[1:])
