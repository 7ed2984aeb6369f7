"A translator in the world: streams of any length, texts with anything in them, a hub that is not there."
import copy
import io
import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sentencepiece
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from annotated_transformer.v1.decoding import DecodingConfig
from annotated_transformer.v1.toy_languages import toy_ende
from annotated_transformer.v1.transformer import Transformer, TransformerConfig
from annotated_transformer.v1.translator import FILES, Translation, Translator, chunks
from annotated_transformer.v1.vocabulary import SentencePieceTokenizer, open_spm, train_tokenizer

PAIRS = [(p.src, p.tgt) for p in toy_ende('train', n=300)]
TEXTS = [src for src, _ in PAIRS[:23]]
QUICK = dict(beam_size=1, max_extra=3)


def sentencepiece_tokenizer():
    "As the models of Marian have it, learned here."
    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for pair in PAIRS for text in pair]), model_writer=data,
        vocab_size=200, hard_vocab_limit=False, minloglevel=2)
    model = open_spm(data.getvalue())
    pieces = [model.id_to_piece(i) for i in range(len(model)) if not model.is_control(i) and not model.is_unknown(i)]
    return SentencePieceTokenizer([data.getvalue()]*2, [pieces]*2, ('en', 'de'))

def make(kind='bpe', seed=0, **sizes):
    "A small translator that knows nothing and says something."
    tokenizer = (sentencepiece_tokenizer() if kind == 'sentencepiece'
                 else train_tokenizer(kind, PAIRS, ('en', 'de'), vocab_size=300))
    torch.manual_seed(seed)
    model = Transformer(TransformerConfig(
        len(tokenizer), **dict(n_layers=1, d_model=16, d_ff=24, n_heads=2, max_len=40, dropout=0.) | sizes))
    for p in model.parameters(): torch.nn.init.normal_(p, std=0.4)
    return Translator(model, tokenizer)

@pytest.fixture(scope='module')
def translator(): return make()
@pytest.fixture(scope='module', params=['bpe', 'words', 'sentencepiece'])
def either(request): return make(request.param)
@pytest.fixture(scope='module')
def folder(tmp_path_factory, translator):
    out = tmp_path_factory.mktemp('models') / 'model'
    translator.save(out)
    return out

def said_by(run):
    "What a call gives, and what it warns of."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        return run(), [str(w.message) for w in said]


# --- streams

@pytest.mark.parametrize('options', [
    QUICK, dict(beam_size=3, max_extra=3), dict(beam_size=3, max_extra=3, prefix='Der')], ids=str)
@pytest.mark.parametrize('read_ahead', [1, 4, 23, 1000])
def test_a_stream_is_translated_like_a_list(translator, options, read_ahead):
    expected = translator.translate(TEXTS, **options)
    found = translator.translate(iter(TEXTS), read_ahead=read_ahead, **options)
    assert iter(found) is found and list(found) == expected
    assert translator.translate(tuple(TEXTS), **options) == expected
    assert list(translator.translate((text.encode() + b'\n' for text in TEXTS),
                                     read_ahead=read_ahead, **options)) == expected
    assert [translator.translate(text, **options) for text in TEXTS[:5]] == expected[:5]
    assert len(set(expected)) > 5                        # or nothing would show that the order was kept

def test_a_stream_is_read_no_further_than_it_must(translator):
    read = []
    def lines():
        for i in itertools.count():
            read.append(i)
            yield TEXTS[i % 23]
    stream = translator.translate(lines(), read_ahead=5, **QUICK)
    assert not read                                      # nothing happens until somebody asks
    list(itertools.islice(stream, 5))
    assert len(read) == 5
    next(stream)
    assert len(read) == 10

def test_long_texts_make_small_chunks():
    sizes = [[len(text) for text, in chunk]
             for chunk in chunks((('x' * n,) for n in (3, 3, 3, 20, 1, 9, 9)), 4, letters=10)]
    assert sizes == [[3, 3, 3], [20], [1, 9], [9]]
    assert [len(c) for c in chunks(zip(range(10)), 4)] == [4, 4, 2]

def test_what_goes_wrong_in_the_stream_itself_is_not_hidden(translator):
    def lines():
        yield TEXTS[0]
        raise OSError('the line is dead')
    with pytest.raises(OSError, match='the line is dead'): list(translator.translate(lines(), **QUICK))

def test_one_bad_line_does_not_stop_the_rest(translator):
    mixed = [TEXTS[0], b'na\xefve', None, TEXTS[1], 7, TEXTS[2].encode()]
    good = translator.translate(TEXTS[:3], **QUICK)
    for source in (mixed, iter(mixed)):
        found, said = said_by(lambda: list(translator.translate(source, **QUICK)))
        assert found == [good[0], '', '', good[1], '', good[2]]
        assert len(said) == 1 and '3 of 6 lines' in said[0] and 'line 2: not UTF-8' in said[0]
    for source in (mixed, iter(mixed)):
        with pytest.raises(ValueError, match='line 2: not UTF-8'):
            list(translator.translate(source, on_error='raise', **QUICK))
    with pytest.raises(ValueError, match="on_error='ignore'"): translator.translate(TEXTS, on_error='ignore')

def test_what_is_cut_is_said_once(translator):
    long = ['dog ' * 100, 'a', 'cat ' * 300, '', *TEXTS[:5]]
    for source in (long, iter(long), (text for text in long)):
        found, said = said_by(lambda: list(translator.translate(source, read_ahead=1, **QUICK)))
        assert len(found) == 9 and len(said) == 1
        assert '2 of 9 sentences had more than the 39 tokens' in said[0]
    assert said_by(lambda: translator.translate(TEXTS, **QUICK))[1] == []

def test_what_is_cut_is_called_by_its_name(translator):
    long = 'hund ' * 100
    _, [said] = said_by(lambda: translator.translate(['a', 'b', ''], prefix=['', long, None], **QUICK))
    assert '1 of 3 prefixes had more than the 39 tokens' in said
    for ask in (translator.score, translator.perplexity):
        assert '1 of 2 translations had more than the 39 tokens' in said_by(lambda: ask(['a', 'b'], ['x', long]))[1][0]
    assert '1 of 1 translations' in said_by(lambda: translator.attention('a', long))[1][0]

@pytest.mark.parametrize('source, total, shown', [
    (list, None, '23/23'), (iter, None, '23sentence'), (iter, 23, '23/23')])
def test_the_bar_counts_sentences(translator, capsys, source, total, shown):
    list(translator.translate(source(['', *TEXTS[1:]]), progress_bar=True, total=total, read_ahead=4, **QUICK))
    assert shown in capsys.readouterr().err
    list(translator.translate(source(TEXTS), **QUICK))
    assert capsys.readouterr().err == ''

PEAK = '''
import sys
from annotated_transformer.v1.cli import main
main(sys.argv[1:])
print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)
'''

def peak_memory(folder, lines, tmp_path):
    "MiB that the command line takes to translate a file of so many lines, and the translations."
    source, out = tmp_path / f'{lines}.txt', tmp_path / f'{lines}.out'
    source.write_text(''.join(f'{TEXTS[i % 23]}\n' for i in range(lines)), encoding='utf-8')
    flags = ['--model', folder, '--input', source, '--output', out, '--beam-size', '1', '--max-extra', '3']
    done = subprocess.run([sys.executable, '-c', PEAK, 'translate', *map(str, flags)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f'{lines}/{lines}' in done.stderr             # the bar knew how many
    return int(done.stderr.split()[-1]) / 1024, out.read_text(encoding='utf-8').split('\n')

@pytest.mark.skipif(not Path('/proc/self/status').is_file(), reason='peak memory is read from /proc')
def test_memory_does_not_grow_with_the_file(folder, translator, tmp_path):
    expected = translator.translate(TEXTS, **QUICK)
    few, _ = peak_memory(folder, 2_500, tmp_path)        # more than are read ahead
    many, found = peak_memory(folder, 20_000, tmp_path)
    assert found == [expected[i % 23] for i in range(20_000)] + ['']
    # 17,500 more lines, kept whole, would be some 10 MiB of ids alone
    assert many - few < 10, (few, many)

@pytest.mark.full
def test_a_million_lines(folder, translator, tmp_path):
    few, _ = peak_memory(folder, 20_000, tmp_path)
    many, found = peak_memory(folder, 1_000_000, tmp_path)
    assert len(found) == 1_000_001 and many - few < 20, (few, many)


# --- texts with anything in them

LETTERS = st.characters(exclude_categories=())           # every code point, lone surrogates too
ODD = st.sampled_from(['', ' ', '\n', '\N{DOG}' * 50, 'שלום', 'مرحبا \u202e', '\x00', '\x1b[2J', '\ud800',
                       'a' * 2000, '<eos>', '￭', '▁', '\u2028', '\ufeff', 'e\u0301' * 30, '\U000e0001',
                       '1' * 400, '. ' * 200, '\udfff\ud800', '⁇ <unk>'])
STRINGS = st.text(LETTERS, max_size=2000) | ODD | st.lists(ODD, max_size=4).map(''.join) | st.sampled_from(TEXTS)
LIGHT = settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
HEAVY = settings(max_examples=3000, deadline=None, database=None)

def check_any_list(translator, texts):
    found, said = said_by(lambda: translator.translate(texts, **QUICK))
    assert isinstance(found, list) and len(found) == len(texts) and all(isinstance(text, str) for text in found)
    for text in found: text.encode('utf-8')              # no half of a character comes out
    long = sum(len(row) > 39 for row in translator.tokenizer.encode_batch(texts, 'en'))
    assert len(said) == bool(long)
    if long: assert f'{long} of {len(texts)} sentences' in said[0]
    assert all(translation == '' for text, translation in zip(texts, found) if not text.strip())

def check_any_text(translator, text):
    alone, _ = said_by(lambda: translator.translate(text, **QUICK))
    among, _ = said_by(lambda: translator.translate([TEXTS[0], text, ''], **QUICK))
    assert isinstance(alone, str) and among == [translator.translate(TEXTS[0], **QUICK), alone, '']

@LIGHT
@given(texts=st.lists(STRINGS, max_size=6))
def test_any_list_of_any_strings(either, texts): check_any_list(either, texts)

@LIGHT
@given(text=STRINGS)
def test_any_string_in_company_and_alone(either, text): check_any_text(either, text)

@settings(LIGHT, max_examples=20)
@given(texts=st.lists(STRINGS, min_size=1, max_size=3), prefix=STRINGS, beam_size=st.integers(1, 3))
def test_any_string_through_every_door(either, texts, prefix, beam_size):
    def doors():
        best = either.translate_n_best(texts, n_best=beam_size, beam_size=beam_size, max_extra=2)
        streamed = list(either.translate(iter(texts), beam_size=beam_size, max_extra=2, read_ahead=2))
        forced = either.translate(texts, prefix=prefix, **QUICK)
        return (best, streamed, forced, either.sample(texts, seed=0),
                either.score(texts, [prefix] * len(texts)), either.attention(texts[0], prefix))
    best, streamed, forced, drawn, scores, maps = said_by(doors)[0]
    assert [ways[0].text for ways in best] == streamed and len(forced) == len(drawn) == len(scores) == len(texts)
    assert all(score <= 0 and math.isfinite(score) for score in scores)
    assert maps.cross.shape[-2:] == (len(maps.tgt), len(maps.src))

@pytest.mark.full
@HEAVY
@given(texts=st.lists(STRINGS, max_size=12))
def test_very_many_lists(either, texts): check_any_list(either, texts)

@pytest.mark.full
@HEAVY
@given(text=STRINGS)
def test_very_many_strings(either, text): check_any_text(either, text)


# --- the other doors

def test_several_translations_of_each(translator):
    best = translator.translate_n_best(TEXTS[:4], n_best=3, beam_size=5, max_extra=3)
    assert ([len(ways) for ways in best] == [3] * 4
            and all(isinstance(way, Translation) for ways in best for way in ways))
    assert [ways[0].text for ways in best] == translator.translate(TEXTS[:4], beam_size=5, max_extra=3)
    for ways in best: assert [way.score for way in ways] == sorted((way.score for way in ways), reverse=True)
    assert list(translator.translate_n_best(iter(TEXTS[:4]), n_best=3, beam_size=5, max_extra=3)) == best
    alone = translator.translate_n_best(TEXTS[0], n_best=3, beam_size=5, max_extra=3)
    assert ([way.text for way in alone] == [way.text for way in best[0]]
            and alone[0].score == pytest.approx(best[0][0].score, abs=1e-3))
    with pytest.raises(ValueError, match='translate_n_best'): translator.translate(TEXTS, n_best=2)
    with pytest.raises(ValueError, match='n_best=5'): translator.translate_n_best(TEXTS, n_best=5, beam_size=4)

def test_prefixes_are_kept(translator):
    found = translator.translate(TEXTS[:3], prefix=['Der Hund', None, ''], **QUICK)
    assert found[0].startswith('Der Hund') and found[1:] == translator.translate(TEXTS[1:3], **QUICK)
    assert all(text.startswith('Die') for text in translator.translate(iter(TEXTS), prefix='Die', **QUICK))
    for prefix in (['Der'], ['Der'] * 4):
        with pytest.raises(ValueError): translator.translate(TEXTS[:3], prefix=prefix, **QUICK)

def test_scores_are_those_of_teacher_forcing():
    translator = make(max_len=100)
    src, tgt = zip(*PAIRS[:9])
    together = translator.score(src, tgt)
    for source, target, found in zip(src, tgt, together):
        ids = [1, *translator.tokenizer.encode(target)]
        with torch.no_grad():
            logits = translator.model(torch.tensor([translator.tokenizer.encode(source) + [2]]),
                                      torch.tensor([ids]))[0]
        logits[:, :2] = -torch.inf                       # PAD and BOS are never written
        expected = logits.log_softmax(-1)[range(len(ids)), [*ids[1:], 2]].sum().item()
        assert found == pytest.approx(expected, abs=1e-3)
        assert translator.score(source, target) == pytest.approx(found, abs=1e-3)
    assert translator.score(src, tgt, max_tokens=1) == pytest.approx(together, abs=1e-3)

def test_what_was_found_has_the_score_of_what_was_read():
    translator, alike = Translator.load(device='cpu'), 0          # it knows how to end
    for text, ways in zip(TEXTS, translator.translate_n_best(TEXTS, n_best=2, beam_size=3, alpha=0.7)):
        for way in ways:
            length = len(translator.tokenizer.encode(way.text, 'de')) + 1
            if way.log_prob != pytest.approx(translator.score(text, way.text), abs=1e-3): continue # other tokens
            assert way.score == pytest.approx(way.log_prob / ((5 + length)/6)**0.7, abs=1e-3)
            alike += 1
    assert alike >= 1.5*len(TEXTS)

def test_samples_follow_their_seed(translator):
    first = translator.sample(TEXTS, seed=5)
    assert first == translator.sample(TEXTS, seed=5) != translator.sample(TEXTS, seed=6)
    assert translator.sample(TEXTS, seed=None) != translator.sample(TEXTS, seed=None)
    assert translator.sample(TEXTS, top_k=1) == translator.translate(TEXTS, beam_size=1)
    assert translator.sample('') == '' and isinstance(translator.sample(TEXTS[0], temperature=2., top_p=0.5), str)


# --- how a model wants to be decoded

def test_a_models_own_settings(translator, tmp_path):
    own = Translator(translator.model, translator.tokenizer, dict(decoding=dict(beam_size=1, max_extra=2)))
    assert own.translate(TEXTS) == translator.translate(TEXTS, beam_size=1, max_extra=2) != translator.translate(TEXTS)
    assert own.translate(TEXTS, beam_size=4, max_extra=50) == translator.translate(TEXTS)
    own.save(tmp_path / 'own')
    assert Translator.load(tmp_path / 'own').decoding == DecodingConfig(beam_size=1, max_extra=2)
    assert translator.decoding == DecodingConfig()

@pytest.mark.parametrize('decoding', [dict(beam_size=0), dict(beams=2), 7, dict(alpha='x')], ids=str)
def test_settings_that_cannot_be(translator, tmp_path, decoding):
    translator.save(tmp_path)
    (tmp_path / 'training.json').write_text(json.dumps(dict(decoding=decoding)))
    with pytest.raises(ValueError, match=r'training\.json: its "decoding" cannot be'): Translator.load(tmp_path)

@pytest.mark.parametrize('text', ['[]', '{"run": ', '7'])
def test_a_damaged_training_json_is_named(translator, tmp_path, text):
    translator.save(tmp_path)
    (tmp_path / 'training.json').write_text(text)
    with pytest.raises(ValueError, match=r'training\.json is damaged'): Translator.load(tmp_path)


# --- the hub

class FakeHub:
    "What the hub was told."
    def __init__(self): self.repos, self.files = {}, {}
    def create_repo(self, repo_id, private, exist_ok):
        assert exist_ok
        self.repos[repo_id] = private
        return f'https://hub/{repo_id}'
    def upload_folder(self, repo_id, folder_path, commit_message):
        assert repo_id in self.repos and commit_message
        self.files = {str(p.relative_to(folder_path)): p.read_bytes()
                      for p in sorted(Path(folder_path).rglob('*')) if p.is_file()}

@pytest.mark.parametrize('private', [True, False])
def test_what_is_put_on_the_hub_is_the_folder(translator, folder, monkeypatch, private):
    hub = FakeHub()
    monkeypatch.setattr('huggingface_hub.HfApi', lambda: hub)
    assert translator.push_to_hub('me/model', private=private) == 'https://hub/me/model'
    assert hub.repos == {'me/model': private} and set(hub.files) == set(FILES)
    assert hub.files == {p.name: p.read_bytes() for p in folder.iterdir()}

def test_the_hub_asks_for_what_the_library_offers():
    import inspect
    from huggingface_hub import HfApi, snapshot_download
    for function, names in ((HfApi.create_repo, 'repo_id private exist_ok'),
                            (HfApi.upload_folder, 'repo_id folder_path commit_message'),
                            (snapshot_download, 'repo_id revision allow_patterns')):
        assert set(names.split()) <= set(inspect.signature(function).parameters)

def test_from_a_folder_and_from_the_hub(folder, translator, monkeypatch):
    expected = translator.translate(TEXTS, **QUICK)
    assert Translator.from_pretrained(folder).translate(TEXTS, **QUICK) == expected
    assert isinstance(Translator.from_pretrained(str(folder), device='cpu'), Translator)
    asked = []
    def snapshot_download(name, revision, allow_patterns):
        asked.append((name, revision, sorted(allow_patterns)))
        return str(folder)
    monkeypatch.setattr('huggingface_hub.snapshot_download', snapshot_download)
    assert Translator.from_pretrained('me/model', revision='v1').translate(TEXTS, **QUICK) == expected
    assert asked == [('me/model', 'v1', sorted(FILES))]

def test_without_the_library(translator, monkeypatch):
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    for door in (Translator.from_pretrained, translator.push_to_hub):
        with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[hub\]'"): door('me/model')

ASK = '''
import sys, time
from annotated_transformer.v1.translator import Translator
began = time.monotonic()
for what in (lambda: Translator.from_pretrained('me/model'),
             lambda: Translator.load(sys.argv[1]).push_to_hub('me/model'),
             lambda: Translator.from_pretrained('a name/with/too much')):
    try: what()
    except OSError as error: print(error)
assert time.monotonic() - began < 60
'''

@pytest.mark.parametrize('refused', [
    dict(HF_HUB_OFFLINE='1'), dict(HF_ENDPOINT='http://127.0.0.1:9', HF_TOKEN='x')], ids=['offline', 'closed port'])
def test_no_way_to_the_hub_is_one_clear_line(folder, tmp_path, refused):
    env = os.environ | dict(HF_HOME=str(tmp_path), HF_HUB_OFFLINE='0') | refused
    done = subprocess.run([sys.executable, '-c', ASK, str(folder)], capture_output=True, text=True, env=env)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3, done
    assert lines[0].startswith('me/model is no folder here and could not be fetched from the Hugging Face Hub: ')
    assert lines[1].startswith('the Hugging Face Hub did not take me/model: ')
    assert lines[2].startswith('a name/with/too much is no folder here')

def test_maps_are_of_ones_own_thread(translator):
    "A server that shows attention to one reader while it translates for others."
    text, others = TEXTS[0], TEXTS[1:6]
    maps, translations = translator.attention(text), translator.translate(others, **QUICK)
    with ThreadPoolExecutor(4) as pool:
        served = [pool.submit(translator.translate, others, **QUICK) for _ in range(20)]
        looked = [pool.submit(translator.attention, text) for _ in range(40)]
    assert [one.result() for one in served] == [translations] * 20
    for one in looked: torch.testing.assert_close(one.result().cross, maps.cross)
    assert not [m for m in translator.model.modules() if getattr(m, '_seen', None)]

def test_a_model_without_numbers_says_so(translator):
    broken = Translator(copy.deepcopy(translator.model), translator.tokenizer)
    with torch.no_grad(): broken.model.decoder.layers[0].feed_forward.outer.bias[0] = math.nan
    for say in (broken.translate, broken.sample, lambda text: broken.translate(text, beam_size=1),
                lambda text: broken.score(text, text)):
        with pytest.raises(FloatingPointError, match='logits are NaN'): say(TEXTS[0])

def test_a_beginning_stays_as_it_was_typed(either):
    for prefix in ('„Zoë', 'Zoë 3 ', 'Der ☃'):
        assert either.translate(TEXTS[0], prefix=prefix, **QUICK).startswith(prefix.rstrip())
