"Translator: streams of any length, texts with anything in them, scores, settings, threads."
import copy
import itertools
import json
import math
import os
import subprocess
import sys
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from annotated_transformer.attention import attention
from annotated_transformer.inference import DecodingConfig
from annotated_transformer.text_streams import to_text
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.translator import FILES, Translation, Translator
from annotated_transformer.vocabulary import BOS, EOS, PAD, UNK, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAIRS = [(pair.src, pair.tgt) for pair in toy_ende('train', n=300)]
TEXTS = [src for src, _ in PAIRS[:23]]
QUICK = {'beam_size': 1, 'max_extra_tokens': 3}


def make(kind='bpe', seed=0, **sizes):
    "A small untrained translator with weights large enough for varied translations."
    tokenizer = train_tokenizer(kind, PAIRS, ('en', 'de'), vocab_size=300)
    torch.manual_seed(seed)
    config = {'n_layers': 1, 'd_model': 16, 'd_ff': 24, 'n_heads': 2, 'max_len': 40, 'dropout': 0.0} | sizes
    model = Transformer(TransformerConfig(len(tokenizer), **config))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return Translator(model, tokenizer)


@pytest.fixture(scope='module')
def translator():
    return make()


@pytest.fixture(scope='module', params=['bpe', 'words'])
def either(request):
    return make(request.param)


@pytest.fixture(scope='module')
def folder(tmp_path_factory, translator):
    path = tmp_path_factory.mktemp('models') / 'model'
    translator.save(path)
    return path


def with_warnings(run):
    "The result of a call, and the messages of its warnings."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        return run(), [str(warning.message) for warning in caught]


# --- loading and saving

def test_the_shipped_model_translates():
    translator = Translator.load(device='cpu')
    assert translator.translate('The small dog sees a cat.') == 'Der kleine Hund sieht eine Katze.'
    pairs = toy_ende('test', n=40)
    found = translator.translate([pair.src for pair in pairs])
    assert sum(translation == pair.tgt for translation, pair in zip(found, pairs)) >= 36
    assert repr(translator) == 'Translator(en to de, 790,528 parameters on cpu)'


def test_a_saved_folder_gives_the_same_translations(translator, folder):
    assert {path.name for path in folder.iterdir()} == {*FILES, 'README.md'}
    assert Translator.load(folder, 'cpu').translate(TEXTS) == translator.translate(TEXTS)


def test_a_loaded_model_is_accelerated_and_computes_the_same(translator, folder):
    loaded = Translator.load(folder, 'cpu')
    assert loaded.model.encoder.layers[0].self_attention.attention_fn is not attention
    assert translator.model.encoder.layers[0].self_attention.attention_fn is attention
    assert loaded.score(TEXTS, TEXTS) == pytest.approx(translator.score(TEXTS, TEXTS), abs=1e-3)
    torch.testing.assert_close(loaded.attention(TEXTS[0], 'Der').cross, translator.attention(TEXTS[0], 'Der').cross)


@pytest.mark.parametrize('missing', [name for name in FILES if name != 'training.json']) # a checkpoint has none
def test_a_missing_file_is_named(folder, tmp_path, missing):
    for name in FILES:
        if name != missing:
            (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(FileNotFoundError, match=missing):
        Translator.load(tmp_path)


DAMAGE = { # file: content, a part of the message
    'config.json': [
        (b'', 'config.json is damaged: '), (b'{}', "config.json cannot be used: kind='' is unknown"),
        (b'{"model_type": "marian"}', "of transformers .model_type='marian'.: convert a Marian model with import_marian")],
    'model.safetensors': [(None, 'model.safetensors is damaged or incomplete, copy it again: ')],
    'tokenizer.json': [
        (b'', 'tokenizer.json is not a tokenizer file'),
        (b'{"version": "1.0", "model": {}}', "tokenizer.json is in Hugging Face's format: use the tokenizer.json that"),
        (b'{"kind": "words", "langs": ["en", "de"], "tokens": ["<pad>", "<bos>", "<eos>", "<unk>"]}',
         'tokenizer.json has 4 tokens, the model has .*: restore the tokenizer')],
}


@pytest.mark.parametrize('name, content, message',
                         [(name, *case) for name, cases in DAMAGE.items() for case in cases], ids=range(7))
def test_a_damaged_file_is_named(folder, tmp_path, name, content, message):
    for file in FILES:
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    size = (folder / name).stat().st_size
    for damaged in [content] if content is not None else [(folder / name).read_bytes()[:n] for n in (0, 999, size - 9)]:
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            Translator.load(tmp_path)


def test_a_path_that_is_no_model_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'pairs.tsv').write_text('a\tb\n')
    for load in (Translator.load, Translator.from_pretrained):
        for path, message in [('pairs.tsv', 'pairs.tsv is a file, not a model folder$'),
                              (folder / 'model.safetensors', f'a file, not a model folder: use its folder, {folder}$'),
                              (tmp_path, 'it has no config.json$')]:
            with pytest.raises(FileNotFoundError, match=message):
                load(path)
        with pytest.raises(ValueError, match="='' is empty: give a name"):
            load('')
    with pytest.raises(FileNotFoundError, match='me/model is not a model folder: .*Hub: Translator.from_pretrained'):
        Translator.load('me/model')
    for path in ('', 'pairs.tsv'):
        with pytest.raises((ValueError, OSError), match="folder='' is empty|pairs.tsv is a file: name a folder"):
            Translator.load(folder).save(path)


def test_a_tokenizer_of_another_model_is_refused(translator):
    other = train_tokenizer('bpe', PAIRS, ('en', 'de'), vocab_size=250)
    with pytest.raises(ValueError, match='the tokenizer has 250 tokens, the model'):
        Translator(translator.model, other)


def test_a_model_that_is_there_is_kept(translator, tmp_path):
    other = make(seed=1)
    translator.save(tmp_path / 'mine')
    before = {path.name: path.read_bytes() for path in (tmp_path / 'mine').iterdir()}
    with pytest.raises(FileExistsError, match=r'mine holds a model already \(config.json, .*overwrite=True'):
        other.save(tmp_path / 'mine')
    assert {path.name: path.read_bytes() for path in (tmp_path / 'mine').iterdir()} == before
    other.save(tmp_path / 'mine', overwrite=True)
    assert Translator.load(tmp_path / 'mine', 'cpu').translate(TEXTS, **QUICK) == other.translate(TEXTS, **QUICK)
    (tmp_path / 'notes').mkdir()
    (tmp_path / 'notes/diary.txt').write_text('today')
    other.save(tmp_path / 'notes') # no model there
    (tmp_path / 'foreign').mkdir()
    (tmp_path / 'foreign/config.json').write_text('{}')
    with pytest.raises(FileExistsError, match='config.json'):
        other.save(tmp_path / 'foreign')


def test_the_files_of_a_run_are_always_kept(translator, tmp_path):
    "They could not resume it with another tokenizer."
    run = tmp_path / 'run'
    (run / 'checkpoints/step-00000010').mkdir(parents=True)
    (run / 'checkpoints/step-00000010/progress.json').write_text('{}')
    for kept in (run, run / 'checkpoints/step-00000010'):
        with pytest.raises(FileExistsError, match=f'{kept.name} belongs to a training run'):
            translator.save(kept)
    (run / 'run.json').write_text('{}')
    before = set(tmp_path.rglob('*'))
    for kept in (run, run / 'checkpoints', run / 'checkpoints/step-00000010', run / 'checkpoints/step-00000020'):
        with pytest.raises(FileExistsError, match=f'{kept.name} belongs to a training run'):
            translator.save(kept, overwrite=True)
    assert set(tmp_path.rglob('*')) == before
    translator.save(run / 'smaller') # a new folder inside


def test_the_hub(folder, translator, tmp_path, monkeypatch):
    uploaded = {}
    def upload_folder(path, repo_id, private, message, card):
        uploaded.update({file.name: file.read_bytes() for file in Path(path).iterdir()})
        return f'https://hub/{repo_id}'
    def download_folder(repo_id, names, revision):
        assert repo_id == 'me/model' and tuple(names) == FILES and revision == 'v1'
        return folder
    monkeypatch.setattr('annotated_transformer.translator.upload_folder', upload_folder)
    monkeypatch.setattr('annotated_transformer.translator.download_folder', download_folder)
    assert translator.push_to_hub('me/model') == 'https://hub/me/model'
    assert {name: uploaded[name] for name in FILES} == {name: (folder/name).read_bytes() for name in FILES}
    expected = translator.translate(TEXTS, **QUICK)
    assert Translator.from_pretrained('me/model', revision='v1').translate(TEXTS, **QUICK) == expected
    assert Translator.from_pretrained(str(folder), device='cpu').translate(TEXTS, **QUICK) == expected # no download
    with pytest.raises(ValueError, match="revision='v1' is for models on the Hub, but .*model is here: leave it out"):
        Translator.from_pretrained(folder, revision='v1')


# --- one sentence, lists, streams

@pytest.mark.parametrize('options', [
    QUICK, {'beam_size': 3, 'max_extra_tokens': 3}, {'beam_size': 3, 'max_extra_tokens': 3, 'prefix': 'Der'}], ids=str)
def test_streams_lists_and_single_sentences_agree(translator, options):
    expected = translator.translate(TEXTS, **options)
    for buffer_size in (1, 4, 23, 1000):
        stream = translator.translate(iter(TEXTS), buffer_size=buffer_size, **options)
        assert iter(stream) is stream and list(stream) == expected
    assert translator.translate(tuple(TEXTS), **options) == expected
    lines = (text.encode() + b'\n' for text in TEXTS)
    assert list(translator.translate(lines, buffer_size=4, **options)) == expected
    assert [translator.translate(text, **options) for text in TEXTS[:5]] == expected[:5]
    assert len(set(expected)) > 5 # otherwise the order of the results would not be tested


def test_small_groups_change_nothing(translator):
    expected = translator.translate(TEXTS, **QUICK)
    assert translator.translate(TEXTS, batch_tokens=1, **QUICK) == expected
    assert translator.translate(TEXTS, batch_tokens=30, **QUICK) == expected


@pytest.mark.parametrize('call', [
    lambda t, texts: t.translate(texts, **QUICK), lambda t, texts: list(t.translate(iter(texts), buffer_size=1, **QUICK)),
    lambda t, texts: t.translate_n_best(texts, 1, **QUICK), lambda t, texts: t.sample(texts),
    lambda t, texts: t.score(texts, ['Der'] * len(texts)), lambda t, texts: t.perplexity(texts, ['Der'] * len(texts)),
    lambda t, texts: t.attention(texts[1], 'Der'),
    lambda t, texts: Translator(t.model, t.tokenizer, {'decoding': QUICK}).attention(texts[1])], ids=range(8))
def test_line_breaks_and_unknown_characters_are_noticed_once_in_each_call(translator, call, request):
    "A model would translate the first line alone, and guess at the rest."
    texts = ['The dog sleeps.', 'The dog sleeps.\nThe \N{SNOWMAN} cat sleeps.', 'The cat\n']
    found, messages = with_warnings(lambda: call(translator, texts))
    total, number = (1, 1) if request.node.callspec.id in '67' else (3, 2) # attention has one sentence
    assert messages == [
        f'line breaks are read as spaces: 1 of {total} sentences (number {number}). '
        'Translate each line by itself, or the model may leave some out',
        f'unknown to the tokenizer, and read as <unk>: \N{SNOWMAN} in 1 of {total} sentences (number {number})']


USER = """
from annotated_transformer.translator import Translator
t = Translator.load(device='cpu')
t.translate('The ☃ sleeps.')
for _ in t.translate(iter(['The ☃ sleeps.'])): pass
t.sample(['The ☃ sleeps.'])
"""


def test_a_warning_shows_the_line_of_the_program(tmp_path):
    "In a process of its own: here, a type checker would stand between the program and the library."
    (tmp_path / 'user.py').write_text(USER, encoding='utf-8')
    done = subprocess.run([sys.executable, '-X', 'utf8', 'user.py'], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {'PYTHONPATH': str(ROOT)})
    places = [line.split(': ')[0].rpartition('user.py')[2] for line in done.stderr.splitlines() if 'Warning' in line]
    assert places == [':4', ':5', ':6'], done.stderr


def test_unknown_words_are_named():
    _, messages = with_warnings(lambda: make('words').translate(['The zebra, the small zebra, the yak.'], **QUICK))
    assert messages == ['unknown to the tokenizer, and read as <unk>: zebra yak in 1 of 1 sentences (number 1)']


def test_unknown_characters_of_translations_and_prefixes(translator):
    _, [message] = with_warnings(lambda: translator.score('A dog.', 'Ein \N{SNOWMAN}.'))
    assert message.endswith('\N{SNOWMAN} in 1 of 1 target sentences (number 1)')
    _, [message] = with_warnings(lambda: translator.translate('A dog.', prefix='\N{SNOWMAN}', **QUICK))
    assert message.endswith('\N{SNOWMAN} in 1 of 1 prefixes (number 1)')


def test_a_stream_is_read_buffer_by_buffer(translator):
    read = []
    def lines():
        for i in range(100):
            read.append(i)
            yield TEXTS[i % 23]
    stream = translator.translate(lines(), buffer_size=5, **QUICK)
    assert not read # nothing is read before the first translation is asked for
    list(itertools.islice(stream, 5))
    assert len(read) == 5
    next(stream)
    assert len(read) == 10


def test_an_error_of_the_stream_itself_is_not_hidden(translator):
    def lines():
        yield TEXTS[0]
        raise OSError('connection lost')
    with pytest.raises(OSError, match='connection lost'):
        list(translator.translate(lines(), **QUICK))


def test_an_unreadable_line_does_not_stop_the_others(translator):
    mixed = [TEXTS[0], b'na\xefve', b'a\0b', TEXTS[1], b'\xff', TEXTS[2].encode()]
    good = translator.translate(TEXTS[:3], **QUICK)
    for source in (mixed, iter(mixed)):
        found, messages = with_warnings(lambda: list(translator.translate(source, **QUICK)))
        assert found == [good[0], '', '', good[1], '', good[2]]
        assert len(messages) == 1 and '3 of 6 lines' in messages[0] and 'line 2: not UTF-8' in messages[0]
    for source in (mixed, iter(mixed)):
        with pytest.raises(ValueError, match='line 2: not UTF-8'):
            list(translator.translate(source, on_error='stop', **QUICK))


def test_unreadable_and_empty_lines_have_no_scores(translator):
    (found, _) = with_warnings(lambda: translator.translate_n_best([b'\xff', '', ' ', TEXTS[0]], 2, beam_size=2))
    for [translation] in found[:3]:
        assert translation.text == '' and math.isnan(translation.log_prob) and math.isnan(translation.normalized_score)
    assert len(found[3]) == 2 and all(way.log_prob < 0 for way in found[3])


def test_truncation_is_reported_once(translator):
    long = ['a', 'dog ' * 100, 'cat ' * 300, '', *TEXTS[:5]]
    for source in (long, iter(long), (text for text in long)):
        found, messages = with_warnings(lambda: list(translator.translate(source, buffer_size=1, **QUICK)))
        assert len(found) == 9 and len(messages) == 1
        assert 'truncated to 39 tokens' in messages[0] and ': 2 of 9 sentences (number 2, 3; ' in messages[0]
    assert with_warnings(lambda: translator.translate(TEXTS, **QUICK))[1] == []


def test_truncated_prefixes_and_translations_are_called_by_their_names(translator):
    long = 'hund ' * 100
    _, [message] = with_warnings(lambda: translator.translate(['a', 'b', ''], prefix=['', long, None], **QUICK))
    assert 'truncated to 39 tokens' in message and ': 1 of 3 prefixes (number ' in message
    for method in (translator.score, translator.perplexity):
        _, [message] = with_warnings(lambda: method(['a', 'b'], ['x', long]))
        assert ': 1 of 2 target sentences (number ' in message
    _, [message] = with_warnings(lambda: translator.attention('a', long))
    assert '1 of 1 target sentences' in message


@pytest.mark.parametrize('source, total, shown', [
    (list, None, '23/23'), (iter, None, '23sentence'), (iter, 23, '23/23')])
def test_the_progress_bar_counts_sentences(translator, capsys, source, total, shown):
    texts = source(['', *TEXTS[1:]])
    list(translator.translate(texts, progress_bar=True, total=total, buffer_size=4, **QUICK))
    assert shown in capsys.readouterr().err
    list(translator.translate(source(TEXTS), **QUICK))
    assert capsys.readouterr().err == ''


def peak_memory(translator, n_lines):
    "Bytes of Python objects that a stream of so many lines of 5 kB takes at most."
    lines = (f'The dog sees {i} cats. ' * 220 for i in range(n_lines))
    tracemalloc.start()
    for _ in translator.translate(lines, buffer_size=10, beam_size=1, max_extra_tokens=0):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:truncated to')
def test_memory_does_not_grow_with_the_stream(translator):
    peak_memory(translator, 10)
    assert peak_memory(translator, 120) - peak_memory(translator, 20) < 150_000 # 100 more lines are 0.5 MB of text


# --- texts with anything in them

CHARACTERS = st.characters(exclude_categories=()) # every code point, lone surrogates too
ODD = st.sampled_from(['', ' ', '\n', '\N{DOG}' * 50, 'שלום', 'مرحبا \u202e', '\x00', '\x1b[2J', '\ud800', 'a' * 2000,
                       '<eos>', '￭', '▁', '\u2028', '\ufeff', 'e\u0301' * 30, '\U000e0001', '. ' * 200, '⁇ <unk>'])
STRINGS = st.text(CHARACTERS, max_size=2000) | ODD | st.lists(ODD, max_size=4).map(''.join) | st.sampled_from(TEXTS)
LIGHT = settings(max_examples=30, deadline=None, derandomize=True, database=None, phases=[Phase.generate])


@LIGHT
@given(texts=st.lists(STRINGS, max_size=6))
def test_any_list_of_strings(either, texts):
    found, messages = with_warnings(lambda: either.translate(texts, **QUICK))
    assert len(found) == len(texts) and all(isinstance(text, str) for text in found)
    assert all(text.encode('utf-8') is not None for text in found) # no half of a character
    texts = [to_text(text) for text in texts]
    rows = either.tokenizer.encode_batch(texts, 'en')
    problems = {'truncated to 39 tokens': sum(len(row) > 39 for row in rows),
                'line breaks are read as spaces': sum(len(text.strip().splitlines()) > 1 for text in texts),
                'unknown to the tokenizer': sum(UNK in row for row in rows)}
    expected = [(start, n) for start, n in problems.items() if n]
    assert len(messages) == len(expected)
    for message, (start, n) in zip(messages, expected):
        assert message.startswith(start) and f'{n} of {len(texts)} sentences' in message
    for text, row in zip(texts, rows):
        assert bool(either.tokenizer.unknown(text, 'en')) == (UNK in row)
    assert all(translation == '' for text, translation in zip(texts, found) if not text.strip())


@settings(LIGHT, max_examples=15)
@given(texts=st.lists(STRINGS, min_size=1, max_size=3), prefix=STRINGS, beam_size=st.integers(1, 3))
def test_any_string_in_every_method(either, texts, prefix, beam_size):
    def call_all():
        best = either.translate_n_best(texts, n_best=beam_size, beam_size=beam_size, max_extra_tokens=2)
        streamed = list(either.translate(iter(texts), beam_size=beam_size, max_extra_tokens=2, buffer_size=2))
        forced = either.translate(texts, prefix=prefix, **QUICK)
        drawn = either.sample(texts, seed=0)
        scores = either.score(texts, [prefix] * len(texts))
        return best, streamed, forced, drawn, scores, either.attention(texts[0], prefix)
    best, streamed, forced, drawn, scores, maps = with_warnings(call_all)[0]
    assert [translations[0].text for translations in best] == streamed
    assert len(forced) == len(drawn) == len(scores) == len(texts)
    assert all(score <= 0 and math.isfinite(score) for score in scores)
    assert maps.cross.shape[-2:] == (len(maps.tgt), len(maps.src))


# --- wrong arguments

@pytest.mark.parametrize('wrong', [None, 7, 2.5])
def test_what_is_no_text_raises_type_error(translator, wrong):
    name = type(wrong).__name__
    for call in (translator.translate, lambda text: translator.translate_n_best(text, 2), translator.sample,
                 lambda text: translator.score(text, 'a'), lambda text: translator.score('a', text)):
        with pytest.raises(TypeError, match=f'must be a string or .* of strings, got {name}'):
            call(wrong)


CALLS = { # a call: a part of its message
    "t.translate(['A dog.', None])":
        'text[1] must be a string, got NoneType',
    "t.translate(('A dog.', 3))":
        'text[1] must be a string, got int',
    "list(t.translate(iter(['A dog.', None])))":
        'line 2: expected text, got NoneType',
    "t.translate({'A dog.': 1})":
        'a string or an ordered iterable of strings, got dict',
    "t.translate({'A dog.'})":
        'a string or an ordered iterable of strings, got set',
    "t.translate('A dog.', n_best=3)":
        'no argument n_best: for several translations, use translate_n_best(text, 3)',
    "t.translate('A dog.', num_beams=3)":
        'no argument num_beams: did you mean beam_size?',
    "t.translate('A dog.', beam_size=True)":
        'beam_size=True must be a whole number, got bool',
    "t.translate('A dog.', length_penalty='1')":
        "length_penalty='1' must be a number, got str",
    "t.translate('A dog.', buffer_size=1.5)":
        'buffer_size=1.5 must be a whole number',
    "t.translate('A dog.', total='x')":
        "total='x' must be a whole number",
    "t.translate('A dog.', prefix=3)":
        'prefix must be a string, or a list with a string or None for each sentence, got int',
    "t.translate(['A dog.'], prefix=[3])":
        'prefix[0] must be a string, got int',
    "t.translate('A dog.', n=3)":
        'no argument n: for several translations, use translate_n_best(text, 3)',
    "t.translate('A dog.', temperature=0.5)":
        'no argument temperature: to draw a translation at random, use sample(text, temperature=0.5)',
    "t.translate('A dog.', batch_size=8)":
        'no argument batch_size: did you mean batch_tokens?',
    "t.translate('A dog.', 'de')":
        "'de' needs the name of its option, one of prefix, beam_size, ",
    "t.sample('A dog.', 3)":
        '3 needs the name of its option, one of temperature, top_k, top_p, seed, max_extra_tokens, batch_tokens. '
        'For several translations, use sample([text] * 3)',
    "t.sample('A dog.', n=3)":
        'no argument n: for several translations, use sample([text] * 3)',
    "t.sample('A dog.', num_return_sequences=3)":
        'for several translations, use sample([text] * 3)',
    "t.sample('A dog.', beam_size=3)":
        'no argument beam_size: there are temperature, top_k, ',
    "t.translate_n_best('A dog.', None)":
        'n_best=None must be a whole number',
    't.translate_n_best([None], 2)':
        'text[0] must be a string',
    't.sample([None])':
        'text[0] must be a string',
    "t.sample(b'a')":
        'a string or a list of strings, got bytes',
    "t.sample('A dog.', top_k=1.5)":
        'top_k=1.5 must be a whole number',
    "t.sample('A dog.', max_extra_tokens='3')":
        "max_extra_tokens='3' must be a whole number, got str",
    "t.sample('A dog.', seed='x')":
        "seed='x' must be a whole number",
    "t.score(['A dog.'], [None])":
        'translation[0] must be a string',
    "t.score('A dog.', 'A dog.', batch_tokens='1')":
        "batch_tokens='1' must be a whole number",
    "t.perplexity([None], ['A dog.'])":
        'text[0] must be a string',
    "t.attention(['A dog.'])":
        'text must be a string, got list',
    "t.attention('A dog.', 3)":
        'translation must be a string, got int',
    't.explore(3)':
        'text must be a string, got int',
    "t.encode('A dog.')":
        'texts must be a list of strings, got str',
    "Translator('runs/first')":
        "Translator needs a model and its tokenizer. To load a folder: Translator.load('runs/first')",
    "Translator(t.model)":
        'Translator needs a model and its tokenizer, got Transformer and NoneType',
    "Translator(t.model, 'tokenizer.json')":
        'got Transformer and str',
    'Translator.load(None)':
        'folder must be a path, got NoneType: write it as a string',
    'Translator.from_pretrained(3)':
        'name must be a path, got int',
    't.save(None)':
        'folder must be a path, got NoneType',
    't.explore("A dog.").save(None)':
        'path must be a path, got NoneType',
}
UNCHECKED = '''
import sys
from annotated_transformer.translator import Translator
t = Translator.load(device='cpu')
for call in sys.argv[1:]:
    try:
        eval(call)
    except TypeError as error:
        print(error)
'''


# point 7 of the trial of 0.1.0
def test_every_method_names_what_would_be_right():
    "In a process of its own: here, a type checker would raise its own errors."
    done = subprocess.run([sys.executable, '-c', UNCHECKED, *CALLS], capture_output=True, text=True)
    messages = done.stdout.splitlines()
    assert len(messages) == len(CALLS), done
    for (call, expected), message in zip(CALLS.items(), messages):
        assert expected in message, (call, message)


@pytest.mark.parametrize('device', ['gpu', 'cuda:99'])
def test_a_device_that_cannot_be_used(device):
    with pytest.raises(ValueError, match=f'device={device!r} cannot be used here: choose '):
        Translator.load(device=device)


@pytest.mark.parametrize('options, message', [
    ({'beam_size': 0}, 'beam_size=0'), ({'length_penalty': -1.0}, 'length_penalty=-1.0'),
    ({'patience': -2.0}, 'patience=-2.0'),
    ({'batch_tokens': 0}, 'batch_tokens=0 must be from 1 to 10,000,000'),
    ({'buffer_size': 0}, 'buffer_size=0 must be from 1 to 10,000,000'), ({'total': -3}, 'total=-3 must be from 0'),
    ({'beam_size': 10**7}, 'beam_size=10000000 must be at most 1,000: memory grows with it'),
    ({'batch_tokens': 10**12}, 'batch_tokens=1000000000000 must be from 1 to 10,000,000'),
    ({'buffer_size': 10**12}, 'buffer_size=1000000000000 must be from 1 to 10,000,000'),
    ({'min_length': 40}, 'min_length=40 must be below 40, the longest translation of this model'),
    ({'length_penalty': math.nan}, 'length_penalty=nan must be a number')], ids=str)
def test_settings_out_of_range(translator, options, message):
    with pytest.raises(ValueError, match=message):
        translator.translate(TEXTS, **options) # at once, not when the first translation is asked for


@pytest.mark.parametrize('options, message', [
    ({'temperature': math.nan}, 'temperature=nan must be a number'), ({'temperature': 0.0}, 'temperature=0.0, '),
    ({'top_p': 2.0}, 'top_p=2.0'), ({'seed': -1}, 'seed=-1 must be from 0'), ({'seed': 2**63}, 'seed=9223372036854775808'),
    ({'max_extra_tokens': -1}, 'max_extra_tokens=-1'), ({'batch_tokens': 0}, 'batch_tokens=0')], ids=str)
def test_settings_of_samples_out_of_range(translator, options, message):
    with pytest.raises(ValueError, match=message):
        translator.sample(TEXTS, **options)


def test_samples_have_the_longest_length_that_was_asked_for(translator):
    own = Translator(translator.model, translator.tokenizer, {'decoding': {'max_extra_tokens': 0}})
    assert own.sample(TEXTS, seed=1) == translator.sample(TEXTS, max_extra_tokens=0, seed=1)
    assert own.sample(TEXTS, seed=1) != translator.sample(TEXTS, seed=1)


def test_unknown_settings(translator):
    for call in (translator.translate, lambda text, **options: translator.translate_n_best(text, 2, **options)):
        with pytest.raises(TypeError, match='beams'):
            call(TEXTS, beams=3)


def test_lists_of_different_lengths(translator):
    with pytest.raises(ValueError, match='have 2 and 1 sentences: give one translation'):
        translator.score(['a', 'b'], ['x'])
    with pytest.raises(ValueError, match='one sentence with one translation'):
        translator.score(['a', 'b'], 'x')
    with pytest.raises(ValueError, match='no translations'):
        translator.perplexity([], [])
    for prefixes in (['Der'], ['Der'] * 4):
        with pytest.raises(ValueError, match=f'prefix has {len(prefixes)} items, but'):
            translator.translate(TEXTS[:3], prefix=prefixes, **QUICK)
        with pytest.raises(ValueError, match='prefix must have one item for each sentence'):
            list(translator.translate(iter(TEXTS[:3]), prefix=prefixes, **QUICK))


def test_nan_weights_raise_an_error(translator):
    broken = Translator(copy.deepcopy(translator.model), translator.tokenizer)
    with torch.no_grad():
        broken.model.decoder.layers[0].feed_forward.linear2.bias[0] = math.nan
    for call in (broken.translate, broken.sample, lambda text: broken.translate(text, beam_size=1),
                 lambda text: broken.score(text, text)):
        with pytest.raises(FloatingPointError, match='logits are NaN'):
            call(TEXTS[0])


# --- n-best lists, prefixes, scores, samples

def test_n_best(translator):
    options = {'n_best': 3, 'beam_size': 5, 'max_extra_tokens': 3}
    best = translator.translate_n_best(TEXTS[:4], **options)
    assert [len(translations) for translations in best] == [3] * 4
    assert all(isinstance(translation, Translation) for translations in best for translation in translations)
    first = [translations[0].text for translations in best]
    assert first == translator.translate(TEXTS[:4], beam_size=5, max_extra_tokens=3)
    for translations in best:
        scores = [translation.normalized_score for translation in translations]
        assert scores == sorted(scores, reverse=True) and len(set(scores)) == 3
    assert list(translator.translate_n_best(iter(TEXTS[:4]), **options)) == best
    alone = translator.translate_n_best(TEXTS[0], **options)
    assert [translation.text for translation in alone] == [translation.text for translation in best[0]]
    with pytest.raises(ValueError, match='n_best=5'):
        translator.translate_n_best(TEXTS, n_best=5, beam_size=4)


def test_prefixes_are_kept(translator):
    found = translator.translate(TEXTS[:3], prefix=['Der Hund', None, ''], **QUICK)
    assert found[0].startswith('Der Hund') and found[1:] == translator.translate(TEXTS[1:3], **QUICK)
    assert all(text.startswith('Die') for text in translator.translate(iter(TEXTS), prefix='Die', **QUICK))


def test_a_prefix_with_unknown_characters_stays_as_it_was_given(either):
    for prefix in ('„Zoë', 'Zoë 3 ', 'Der ☃'):
        assert either.translate(TEXTS[0], prefix=prefix, **QUICK).startswith(prefix.rstrip())


def test_scores_are_those_of_teacher_forcing():
    translator = make(max_len=100)
    src, tgt = zip(*PAIRS[:9], ('', 'Der Hund'), ('The dog', ''), ('', ''))
    together = translator.score(src, tgt)
    n_tokens = 0
    for source, target, found in zip(src, tgt, together):
        ids = translator.tokenizer.encode(target)
        with torch.no_grad():
            logits = translator.model(torch.tensor([[*translator.tokenizer.encode(source), EOS]]),
                                      torch.tensor([[BOS, *ids]]))[0]
        logits[:, [PAD, BOS]] = -torch.inf # never generated
        expected = logits.log_softmax(-1)[range(len(ids) + 1), [*ids, EOS]].sum().item()
        assert found == pytest.approx(expected, abs=1e-3)
        assert translator.score(source, target) == pytest.approx(found, abs=1e-3)
        n_tokens += len(ids) + 1
    assert translator.score(src, tgt, batch_tokens=1) == pytest.approx(together, abs=1e-3)
    assert translator.perplexity(src, tgt) == pytest.approx(math.exp(-sum(together) / n_tokens), rel=1e-4)


def test_a_translation_has_the_score_that_teacher_forcing_gives_it():
    translator = Translator.load(device='cpu') # trained: its translations end in EOS
    n_equal = 0
    for text, translations in zip(TEXTS, translator.translate_n_best(TEXTS, 2, beam_size=3, length_penalty=0.7)):
        for translation in translations:
            length = len(translator.tokenizer.encode(translation.text, 'de')) + 1
            if translation.log_prob != pytest.approx(translator.score(text, translation.text), abs=1e-3):
                continue # the same text in other tokens
            expected = translation.log_prob / ((5 + length) / 6) ** 0.7
            assert translation.normalized_score == pytest.approx(expected, abs=1e-3)
            n_equal += 1
    assert n_equal >= 1.5 * len(TEXTS)


def test_samples_follow_their_seed(translator):
    first = translator.sample(TEXTS, seed=5)
    assert first == translator.sample(TEXTS, seed=5) != translator.sample(TEXTS, seed=6)
    assert translator.sample(TEXTS) != translator.sample(TEXTS) # a new seed each time
    assert translator.sample(TEXTS, top_k=1) == translator.translate(TEXTS, beam_size=1)
    assert translator.sample('') == ''
    assert isinstance(translator.sample(TEXTS[0], temperature=2.0, top_p=0.5), str)


# --- the model's own settings

def test_a_models_own_settings(translator, tmp_path):
    own = Translator(translator.model, translator.tokenizer, {'decoding': {'beam_size': 1, 'max_extra_tokens': 2}})
    assert own.translate(TEXTS) == translator.translate(TEXTS, beam_size=1, max_extra_tokens=2)
    assert own.translate(TEXTS) != translator.translate(TEXTS)
    assert own.translate(TEXTS, beam_size=4, max_extra_tokens=50) == translator.translate(TEXTS)
    own.save(tmp_path / 'own')
    assert Translator.load(tmp_path / 'own').decoding == DecodingConfig(beam_size=1, max_extra_tokens=2)
    assert translator.decoding == DecodingConfig()


def test_patience_can_be_switched_off():
    shipped = Translator.load(device='cpu')
    impatient = Translator(shipped.model, shipped.tokenizer, {'decoding': {'patience': 0.125, 'beam_size': 8}})
    texts = [pair.src for pair in toy_ende('test_long', n=40)]
    exhaustive = shipped.translate(texts, beam_size=8)
    assert impatient.translate(texts) != exhaustive
    assert impatient.translate(texts, patience=math.inf) == exhaustive


@pytest.mark.parametrize('decoding', [{'beam_size': 0}, {'beams': 2}, 7, {'length_penalty': 'x'}], ids=str)
def test_invalid_settings_in_training_json(translator, tmp_path, decoding):
    translator.save(tmp_path)
    (tmp_path / 'training.json').write_text(json.dumps({'decoding': decoding}))
    with pytest.raises(ValueError, match=r'training\.json: invalid "decoding" settings'):
        Translator.load(tmp_path)


@pytest.mark.parametrize('text', ['[]', '{"run": ', '7'])
def test_a_damaged_training_json_is_named(translator, tmp_path, text):
    translator.save(tmp_path)
    (tmp_path / 'training.json').write_text(text)
    with pytest.raises(ValueError, match=r'training\.json'):
        Translator.load(tmp_path)


# --- attention maps, threads, types

def test_attention_maps(translator):
    maps = translator.attention(TEXTS[0], PAIRS[0][1])
    n_src, n_tgt = len(maps.src), len(maps.tgt)
    assert maps.src[-1] == '<eos>' and maps.tgt[0] == '<bos>'
    assert maps.encoder.shape == (1, 2, n_src, n_src)
    assert maps.decoder.shape == (1, 2, n_tgt, n_tgt)
    assert maps.cross.shape == (1, 2, n_tgt, n_src)
    assert not maps.decoder.triu(1).any()
    for weights in (maps.encoder, maps.decoder, maps.cross):
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    own = translator.attention(TEXTS[0])
    explicit = translator.attention(TEXTS[0], translator.translate(TEXTS[0]))
    assert own.tgt == explicit.tgt and torch.equal(own.cross, explicit.cross)


def test_attention_is_safe_beside_other_threads(translator):
    "A server shows attention to one reader while it translates for others."
    text, others = TEXTS[0], TEXTS[1:6]
    maps = translator.attention(text)
    translations = translator.translate(others, **QUICK)
    with ThreadPoolExecutor(4) as pool:
        translated = [pool.submit(translator.translate, others, **QUICK) for _ in range(10)]
        recorded = [pool.submit(translator.attention, text) for _ in range(20)]
    assert [future.result() for future in translated] == [translations] * 10
    for future in recorded:
        torch.testing.assert_close(future.result().cross, maps.cross)
    assert all(module.attention_fn is attention for module in translator.model.modules()
               if hasattr(module, 'attention_fn'))


def test_type_checkers_see_every_setting_of_translate():
    import inspect
    from annotated_transformer.translator import TranslateSettings
    parameters = [p.name for p in inspect.signature(Translator.translate).parameters.values()
                  if p.kind is p.KEYWORD_ONLY]
    assert parameters == list(TranslateSettings.__annotations__)
