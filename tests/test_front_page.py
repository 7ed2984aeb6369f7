"The examples of the front page are run, so that it cannot promise what is not there."
import re
import shlex
from pathlib import Path

import pytest
import torch

README = (Path(__file__).resolve().parents[1]/'README.md').read_text(encoding='utf-8')


def blocks(language): return re.findall(rf'^```{language}\n(.*?)^```', README, re.M | re.S)


@pytest.fixture
def demo(tmp_path, monkeypatch):
    "An untrained stand-in for the folder that `make demo` leaves."
    from annotated_transformer.transformer import Transformer, TransformerConfig
    from annotated_transformer.translator import Translator
    from annotated_transformer.vocabulary import train_tokenizer
    torch.manual_seed(0)
    tokenizer = train_tokenizer('words', [('The small dog sleeps.', 'Der kleine Hund schläft.')]*3, ('en', 'de'), 100)
    model = Transformer(TransformerConfig(vocab_size=len(tokenizer), n_layers=1, d_model=16, d_ff=32, n_heads=2))
    Translator(model, tokenizer).save(tmp_path/'runs'/'demo')
    monkeypatch.chdir(tmp_path)


def test_python_examples_run(demo):
    found = blocks('python')
    assert found
    for source in found: exec(compile(source, 'README.md', 'exec'), {})


def test_commands_exist():
    from annotated_transformer.cli import parse
    lines = [line for block in blocks('sh') for line in block.splitlines() if line.startswith('annotated-transformer')]
    assert {line.split()[1] for line in lines} >= {'train', 'evaluate', 'translate'}
    for line in lines: parse(shlex.split(line)[1:])
