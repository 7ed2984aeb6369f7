"What benchmarks/record.py and benchmarks/recipe.py write down, and what they refuse to write over."
import hashlib, json, shutil, sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / 'benchmarks'))
import recipe, record

from annotated_transformer.v1.corpora import Corpus, CorpusConfig, load_corpus
from annotated_transformer.v1.recipe import RECIPES, evaluate
from annotated_transformer.v1.translator import SHIPPED, Translator

@pytest.fixture
def corpus(monkeypatch):
    "A few sentences, long ones to validate on: there the searches differ."
    whole = load_corpus(CorpusConfig('toy-ende'))
    splits = dict(val=whole['test_long'][:24], test=whole['test'][:24])
    monkeypatch.setattr(record, 'load_corpus', lambda config: Corpus('few', whole.langs, splits))
    return splits

def made(tmp_path, monkeypatch, *flags):
    "The record that the script makes of the package's model, as of a run."
    run = shutil.copytree(SHIPPED, tmp_path / 'run')
    for name in 'log', 'clock': (run / f'{name}.jsonl').write_text('')
    monkeypatch.setattr(record, 'RESULTS', tmp_path)
    monkeypatch.setattr(sys, 'argv', ['record.py', str(run), 'toy', '--split', 'test', '--command', 'make toy', *flags])
    record.main()
    return json.loads((tmp_path / 'toy.json').read_text('utf-8'))

def test_the_best_search_on_val_translates_the_other_splits(tmp_path, monkeypatch, corpus):
    found = made(tmp_path, monkeypatch, '--beam-size', '1', '4', '--alpha', '0.0', '2.0')
    tried, model = found['tried_on_val'], Translator.load()
    assert list(tried) == [f'beam {beam}, alpha {alpha}' for beam in (1, 4) for alpha in (0.0, 2.0)]
    assert len(set(tried.values())) > 1
    chosen = found['search']
    assert tried[f"beam {chosen['beam_size']}, alpha {chosen['alpha']}"] == max(tried.values())
    for split, pairs in corpus.items():
        assert found['scores'][split]['bleu'] == evaluate(model, pairs, **chosen)[0].bleu
    assert max(tried.values()) == found['scores']['val']['bleu']

def test_a_record_says_what_it_is_of(tmp_path, monkeypatch, corpus):
    found = made(tmp_path, monkeypatch)
    assert found['search'] == dict(beam_size=4, alpha=0.6) and 'tried_on_val' not in found
    assert found['command'] == 'make toy' and found['name'] == 'toy'
    assert found['weights_sha256'] == hashlib.sha256((SHIPPED / 'model.safetensors').read_bytes()).hexdigest()
    assert not found['settings']['corpus'].keys() & set(record.PATHS) and found['settings']['corpus']['extra'] is False
    assert (record.told_of(dict(corpus='files', src='a', extra_src='b', unique=True))
            == dict(corpus='files', unique=True, extra=True))

def test_a_variant_is_asked_for_by_its_name_or_a_part_of_it():
    def asked(*only): return [name for name in recipe.VARIANTS if recipe.wanted(name, only)]
    assert asked('dropout 0.1') == ['dropout 0.1']                  # and not BPE-dropout 0.1
    assert asked('R-Drop', 'ALiBi') == ['R-Drop 1', 'R-Drop 5', 'ALiBi']
    assert asked() == list(recipe.VARIANTS)

def test_another_recipe_does_not_overwrite_a_record(tmp_path):
    args = SimpleNamespace(out=tmp_path / 'recipe.json', epochs=12, flags='')
    new = recipe.recorded(args)
    assert new['recipe'] == RECIPES['multi30k-en-de']
    args.out.write_text(json.dumps(new))
    assert recipe.recorded(args) == new
    for other in dict(epochs=3), dict(machine='another'):
        args.out.write_text(json.dumps(new | other))
        with pytest.raises(SystemExit, match=f'another {next(iter(other))}: choose another --out'):
            recipe.recorded(args)
