"A student of several teachers: what benchmarks/diversify.py gives it to learn from, the models' part played by a list."
import shlex, sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / 'benchmarks'))
import diversify

OWN = [('A dog runs.', 'Ein Hund rennt.'), ('Two cats sleep.', 'Zwei Katzen schlafen.')]
SAYS = { # of each model, its translations of the two sentences, best first
    'forward-1': [['Ein Hund läuft.', 'Ein Hund rennt.'], ['Zwei Katzen schlafen.', 'Katzen schlafen.']],
    'forward-2': [['Hunde laufen.', 'Ein Hund rennt weg.'], ['Zwei Katzen dösen.', 'Katzen schlafen.']],
    'backward': [['A dog is running.', 'Dogs run.'], ['Two cats sleep.', 'Two cats are asleep.']],
    'student-1': [['Ein Hund rennt los.', 'Der Hund rennt.'], ['Zwei Katzen, die schlafen.', 'Zwei Katzen ruhen.']],
}

@pytest.fixture
def go(tmp_path, monkeypatch):
    "Run the script, with the flags given: the commands that it would have run."
    def play(*command, processes=1):
        calls.append(command := list(map(str, command)))
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
    monkeypatch.setattr(diversify, 'load_corpus', lambda config: {'train': OWN}) # there is no other split to look at
    return go

def learnt(folder, n): return list(zip(*((folder / f'further-{n}.{lang}').read_text('utf-8').splitlines()
                                         for lang in ('en', 'de'))))

def test_the_first_student_learns_from_all_that_was_found(go, tmp_path):
    go()
    (dog, hund), (cats, katzen) = OWN
    assert learnt(tmp_path, 1) == [(src, text) for teacher in ('forward-1', 'forward-2')
                                   for src, texts in zip((dog, cats), SAYS[teacher]) for text in texts
                                  ] + [(text, tgt) for tgt, texts in zip((hund, katzen), SAYS['backward'])
                                       for text in texts]

def test_of_one_translation_each_the_lines_have_no_number(go, tmp_path):
    go('--search', '--n-best 1')
    assert [new for _, new in learnt(tmp_path, 1)][:4] == [
        'Ein Hund läuft.', 'Zwei Katzen schlafen.', 'Hunde laufen.', 'Zwei Katzen dösen.']

def test_the_next_goes_on_from_it_with_the_nearest(go, tmp_path):
    calls = go('--rounds', '2', '--nearest', '1', '--student', '--dropout 0.2', '--further', '--dropout 0.3')
    (dog, hund), (cats, katzen) = OWN
    assert learnt(tmp_path, 2) == [ # the student's own among them; what people wrote is there already, and is not
        (dog, 'Der Hund rennt.'), (cats, 'Katzen schlafen.'),
        ('A dog is running.', hund), ('Two cats are asleep.', katzen)]
    first, second = (call for call in calls if '--unique' in call)
    assert '--start-from' not in first and second[second.index('--start-from') + 1] == str(tmp_path / 'student-1')
    assert '--dropout 0.2 --start-from' in shlex.join(second)
    assert '--dropout 0.3 --out' in shlex.join(second)                       # the later of two is the one that counts

def test_what_is_written_is_not_written_again(go, tmp_path):
    assert sum(call[0] == 'translate' for call in go('--rounds', '2')) == 4
    assert not any(call[0] == 'translate' for call in go('--rounds', '2'))
    # another search is another text
    assert sum(call[0] == 'translate' for call in go('--search', '--beam-size 8 --n-best 2')) == 3
