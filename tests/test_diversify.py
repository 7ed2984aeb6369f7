"Which training text benchmarks/diversify.py makes for a student. A table stands in for the models."
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / 'benchmarks'))
import diversify

OWN = [('A dog runs.', 'Ein Hund rennt.'), ('Two cats sleep.', 'Zwei Katzen schlafen.')]
SAYS = { # {model: its translations of each of the two sentences, best first}
    'forward-1': [['Ein Hund läuft.', 'Ein Hund rennt.'], ['Zwei Katzen schlafen.', 'Katzen schlafen.']],
    'forward-2': [['Hunde laufen.', 'Ein Hund rennt weg.'], ['Zwei Katzen dösen.', 'Katzen schlafen.']],
    'backward': [['A dog is running.', 'Dogs run.'], ['Two cats sleep.', 'Two cats are asleep.']],
    'student-1': [['Ein Hund rennt los.', 'Der Hund rennt.'], ['Zwei Katzen, die schlafen.', 'Zwei Katzen ruhen.']],
}

@pytest.fixture
def go(tmp_path, monkeypatch):
    "A function that runs the script with some flags, and returns the commands that it would have run."
    def play(*command, processes=1):
        command = list(map(str, command))
        calls.append(command)
        given = dict(zip(command[1::2], command[2::2]))
        if command[0] == 'translate': Path(given['--output']).write_text(''.join(
            f'{number}\t-1.5\t{text}\n' if given['--n-best'] != '1' else f'{text}\n'
            for number, texts in enumerate(SAYS[Path(given['--model']).name], 1)
            for text in texts[:int(given['--n-best'])]), 'utf-8')
    def go(*flags):
        calls.clear()
        monkeypatch.setattr(sys, 'argv', ['diversify.py', '--data-dir', 'data', '--runs', str(tmp_path),
                                          '--seeds', '1', '2', *flags])
        diversify.main()
        return calls
    calls = []
    monkeypatch.setattr(diversify, 'run', play)
    monkeypatch.setattr(diversify, 'load_corpus', lambda config: {'train': OWN}) # no other split exists
    return go

def training_pairs(folder, n):
    "The pairs that were made for a student."
    sides = [(folder / f'further-{n}.{lang}').read_text('utf-8').splitlines() for lang in ('en', 'de')]
    return list(zip(*sides))

def test_first_student_is_trained_on_all_translations(go, tmp_path):
    go()
    (dog, hund), (cats, katzen) = OWN
    assert training_pairs(tmp_path, 1) == [(src, text) for teacher in ('forward-1', 'forward-2')
                                   for src, texts in zip((dog, cats), SAYS[teacher]) for text in texts
                                  ] + [(text, tgt) for tgt, texts in zip((hund, katzen), SAYS['backward'])
                                       for text in texts]

def test_lines_have_no_number_if_there_is_one_translation_each(go, tmp_path):
    go('--search', '--n-best 1')
    assert [new for _, new in training_pairs(tmp_path, 1)][:4] == [
        'Ein Hund läuft.', 'Zwei Katzen schlafen.', 'Hunde laufen.', 'Zwei Katzen dösen.']

def test_next_student_continues_with_the_nearest_translations(go, tmp_path):
    calls = go('--rounds', '2', '--nearest', '1', '--student', '--dropout 0.2', '--further', '--dropout 0.3')
    (dog, hund), (cats, katzen) = OWN
    assert training_pairs(tmp_path, 2) == [ # among them the student's; the original pairs are left out
        (dog, 'Der Hund rennt.'), (cats, 'Katzen schlafen.'),
        ('A dog is running.', hund), ('Two cats are asleep.', katzen)]
    first, second = (call for call in calls if '--unique' in call)
    assert '--start-from' not in first and second[second.index('--start-from') + 1] == str(tmp_path / 'student-1')
    assert '--dropout 0.2 --start-from' in shlex.join(second)
    assert '--dropout 0.3 --out' in shlex.join(second)                       # the later of two flags counts

def test_finished_translations_are_not_made_again(go, tmp_path):
    assert sum(call[0] == 'translate' for call in go('--rounds', '2')) == 4
    assert not any(call[0] == 'translate' for call in go('--rounds', '2'))
    # another search is another text
    assert sum(call[0] == 'translate' for call in go('--search', '--beam-size 8 --n-best 2')) == 3
