"Both engines give the same translations; conversions are made once, kept, and checked."
import argparse
import math
import shutil
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ctranslate2 = pytest.importorskip('ctranslate2', reason='CTranslate2 is not installed')

from annotated_transformer import engines
from annotated_transformer.checkpoints import build_model
from annotated_transformer.engines import CTranslate2Engine, PyTorchEngine, converted_folder
from annotated_transformer.inference import DecodingConfig
from annotated_transformer.marian import MarianConfig
from annotated_transformer.recurrent import RecurrentConfig
from annotated_transformer.relative_positions import RelativeConfig
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.transformer import TransformerConfig
from annotated_transformer.translator import SHIPPED, Translator
from annotated_transformer.vocabulary import BOS, EOS, PAD, SPECIALS, UNK, WordTokenizer

WORDS = WordTokenizer([*SPECIALS, *[f'w{i}' for i in range(40)]], ('en', 'de'))
SIZES = {'vocab_size': len(WORDS), 'n_layers': 2, 'd_model': 16, 'd_ff': 24, 'n_heads': 4, 'max_len': 64}
PAPER = TransformerConfig(**SIZES)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path / 'cache/annotated_transformer'


def write_model(folder, config=PAPER, seed=0):
    "Write a model whose distributions are sharp enough to end translations at different lengths."
    torch.manual_seed(seed)
    model = build_model(config).eval()
    if hasattr(model, 'lm_head'):
        with torch.no_grad():
            model.lm_head.weight.mul_(3)
    Translator(model, WORDS).save(folder, overwrite=True)
    return folder


def load_both(folder=SHIPPED):
    translators = [Translator.load(folder, 'cpu', engine=engine) for engine in ('pytorch', 'ctranslate2')]
    assert isinstance(translators[0].engine, PyTorchEngine) and isinstance(translators[1].engine, CTranslate2Engine)
    return translators


def random_rows(n=24):
    generator = torch.Generator().manual_seed(0)
    return [[*torch.randint(4, 44, (1 + i % 11,), generator=generator).tolist(), EOS] for i in range(n)]


def assert_same(found, expected, n_ties=0):
    "The same hypotheses in the same order, but for ties of their scores."
    differ = 0
    for ours, theirs in zip(expected, found, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert math.isclose(a.normalized_score, b.normalized_score, abs_tol=1e-4), (a, b)
            assert a.ids != b.ids or math.isclose(a.log_prob, b.log_prob, abs_tol=1e-3)
        differ += [h.ids for h in ours] != [h.ids for h in theirs]
    assert differ <= n_ties


# --- the same translations

@pytest.mark.parametrize('search', [
    {}, {'n_best': 4}, {'length_penalty': 3.0, 'max_extra_tokens': 50}, {'length_penalty': 0.0},
    {'length_penalty': 1.4, 'beam_size': 3}, {'beam_size': 1},
    {'length_penalty': 1.0, 'length_penalty_offset': 0.0, 'n_best': 2}, {'max_extra_tokens': 0}, {'patience': 1.0},
    {'patience': 2.0}], ids=str)
@pytest.mark.parametrize('config', [
    PAPER, replace(PAPER, norm='pre', positions='learned', tied=False, max_len=16), replace(PAPER, positions='none'),
    RelativeConfig(**SIZES), MarianConfig(**SIZES, activation='gelu')], ids=lambda c: type(c).__name__ + c.positions)
def test_beam_search_finds_the_same_hypotheses(tmp_path, config, search):
    pytorch, other = [t.engine for t in load_both(write_model(tmp_path / 'model', config))]
    settings = DecodingConfig(**{'max_extra_tokens': 12} | search)
    rows = [row[-(config.max_len - 1):] for row in random_rows()]
    found = other.beam_search(rows, settings)
    if settings.patience is None:
        assert_same(found, pytorch.beam_search(rows, settings))
    else: # of more finished hypotheses than end the search, CTranslate2 may drop one that ranks first for us
        equal = [a[0].ids == b[0].ids for a, b in zip(found, pytorch.beam_search(rows, settings))]
        assert sum(equal) >= len(rows) - 2


@pytest.fixture(scope='module')
def shipped(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
    yield load_both()
    patch.undo()


TEXTS = [pair.src for pair in toy_ende('test', n=60)]


@pytest.mark.parametrize('settings', [
    {}, {'beam_size': 1}, {'patience': 1.0}, {'prefix': 'Der'}, {'prefix': [None, 'Die kleine'] * 30},
    {'max_extra_tokens': 0, 'prefix': ['', 'Heute'] * 30}], ids=lambda settings: '-'.join(settings))
def test_text_is_the_same(shipped, settings):
    ours, theirs = [translator.translate(TEXTS, **settings) for translator in shipped]
    assert theirs == ours and len(set(ours)) > 40


def test_n_best_lists_and_scores_are_the_same(shipped):
    ours, theirs = [translator.translate_n_best(TEXTS, 4, prefix='Die') for translator in shipped]
    for a, b in zip(ours, theirs):
        assert [way.text for way in a] == [way.text for way in b]
        for ways in zip(a, b):
            assert ways[0].normalized_score == pytest.approx(ways[1].normalized_score, abs=1e-4)
            assert ways[0].log_prob == pytest.approx(ways[1].log_prob, abs=1e-3)


def test_streams_and_odd_lines(shipped):
    odd = ['', TEXTS[0], b'na\xefve', ' ', 'the dog ' * 400, '<eos> <pad>', '\ud800 \0 \U0001f642']
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        ours, theirs = [list(translator.translate(iter(odd), buffer_size=2)) for translator in shipped]
    assert ours == theirs and ours[0] == ours[2] == ours[3] == ''


def test_a_whole_translation_as_a_prefix_is_not_continued(shipped):
    whole = shipped[0].translate(TEXTS)
    assert shipped[1].translate(TEXTS, prefix=whole) == whole
    assert shipped[1].translate(TEXTS, prefix=whole, beam_size=1) == whole
    ours, theirs = [translator.translate_n_best(TEXTS, 3, prefix=whole) for translator in shipped]
    assert [[way.text for way in ways] for ways in theirs] == [[way.text for way in ways] for ways in ours]


@pytest.mark.parametrize('group_size', [1, 16])
def test_the_margin_of_the_first_search_does_not_change_the_result(shipped, monkeypatch, group_size):
    monkeypatch.setattr(engines, 'GROUP_SIZE', group_size) # in larger groups, most sentences get more steps than their margin
    engine = shipped[1].engine
    rows = shipped[1].encode(TEXTS)
    for n_best in (1, 4):
        config = DecodingConfig(n_best=n_best)
        expected = shipped[0].engine.beam_search(rows, config)
        for margin in (1, 2, 3, 4, 60):
            monkeypatch.setattr(engine, 'margin', margin)
            assert_same(engine.beam_search(rows, config), expected)


def test_shorter_sentences_join_a_small_group(shipped):
    "Up to 16 sentences, as far as their own limits allow; those with a prefix stay apart."
    engine = shipped[1].engine
    rows = [[UNK] * n + [EOS] for n in range(3, 33)]
    everyone = list(range(len(rows)))
    groups = engines.length_groups(engines.BatchSearch(engine, rows, DecodingConfig(), None), everyone, 4)
    assert [len(group) for group, _ in groups] == [16, 14]
    assert [max_length for _, max_length in groups] == [37, 21]
    limited = engines.BatchSearch(engine, rows, DecodingConfig(max_extra_tokens=0), None)
    for group, max_length in engines.length_groups(limited, everyone, 4):
        assert all(max_length <= limited.limits[i] for i in group)
    prefix = [[UNK] * (i % 2) for i in everyone]
    search = engines.BatchSearch(engine, rows, DecodingConfig(), prefix)
    for group, _ in engines.length_groups(search, everyone, 4):
        assert len({i % 2 for i in group}) == 1


def test_samples_follow_the_distribution(shipped):
    sentence = 'The old man sees the small dog.'
    shares = []
    for translator in shipped:
        drawn = translator.sample([sentence] * 600, temperature=1.5, top_k=20, top_p=0.95)
        shares.append(sum(text.startswith('Der alte Mann') for text in drawn) / 600)
    assert 0.2 < shares[0] < 0.98 and abs(shares[0] - shares[1]) < 0.12 # four standard errors
    for settings in ({'temperature': 0.0}, {'top_k': -1}, {'top_p': 0.0}):
        with pytest.raises(ValueError, match='choose temperature > 0'):
            shipped[1].sample(sentence, **settings)


def test_never_pad_or_bos(tmp_path):
    model = build_model(MarianConfig(**SIZES)).eval()
    with torch.no_grad():
        model.lm_head.bias[[PAD, BOS]] = 20.0 # most probable by far
    Translator(model, WORDS).save(tmp_path / 'model')
    engine = load_both(tmp_path / 'model')[1].engine
    found = engine.beam_search(random_rows(), DecodingConfig())
    drawn = engine.sample(random_rows(), 1.0, 0, 1.0, None, 20)
    assert not {PAD, BOS} & {i for hypotheses in found for i in hypotheses[0].ids} | {PAD, BOS} & set(sum(drawn, []))


@pytest.mark.parametrize('compute_type', ['float32', 'int8'])
@pytest.mark.parametrize('number', [math.nan, math.inf])
def test_damaged_weights_are_not_converted(tmp_path, compute_type, number):
    "One number is enough. In int8, CTranslate2 would turn it into an ordinary one, and translate."
    folder = write_model(tmp_path / 'model')
    broken = Translator.load(folder, 'cpu')
    with torch.no_grad():
        broken.model.decoder.layers[0].feed_forward.linear1.weight[3, 5] = number
    broken.save(folder, overwrite=True)
    for engine in ('auto', 'ctranslate2'):
        with pytest.raises(ValueError, match='model: decoder.layers.0.*weight in model.safetensors has NaN or infinite'):
            Translator.load(folder, 'cpu', engine, compute_type)
    assert not conversions(folder)


@pytest.mark.parametrize('compute_type', ['float32', 'int8'])
@pytest.mark.parametrize('call', [
    lambda t: t.translate('w1 w2', beam_size=1), lambda t: t.translate('w1 w2', beam_size=1, prefix='w3'),
    lambda t: t.translate('w1 w2'), lambda t: t.translate_n_best('w1 w2', 1, beam_size=1),
    lambda t: t.sample('w1 w2')], ids=['greedy', 'prefix', 'beam', 'scores', 'sample'])
def test_weights_that_overflow_are_reported(tmp_path, compute_type, call):
    "Finite weights whose products are infinite: the logits are NaN."
    if compute_type == 'int8' and 'AVX512' not in torch.backends.cpu.get_cpu_capability():
        pytest.skip('without AVX-512, int8 hides an overflow: infinite products are rounded to integers')
    folder = write_model(tmp_path / 'model')
    broken = Translator.load(folder, 'cpu')
    with torch.no_grad():
        broken.model.encoder.layers[0].feed_forward.linear1.weight[:] = 3e38
        broken.model.encoder.layers[0].feed_forward.linear2.weight[:] = 3e38
    broken.save(folder, overwrite=True)
    translator = Translator.load(folder, 'cpu', 'ctranslate2', compute_type)
    with pytest.raises(FloatingPointError, match='its weights are damaged'):
        call(translator)


def test_greedy_text_needs_no_scores(shipped, monkeypatch):
    "Without scores, CTranslate2 is asked for less; each translation stops at its own limit."
    engine = shipped[1].engine
    asked = []

    class Recorder:
        device = 'cpu'
        def translate_batch(self, rows, *args, **options):
            asked.append(options.get('return_scores', False))
            return original.translate_batch(rows, *args, **options)
        def score_batch(self, *args, **options):
            return original.score_batch(*args, **options)

    original = engine.translator
    monkeypatch.setattr(engine, 'translator', Recorder())
    for extra in (0, 1, 50):
        settings = {'beam_size': 1, 'max_extra_tokens': extra}
        asked.clear()
        texts = shipped[1].translate(TEXTS, **settings)
        assert asked == [False] and texts == shipped[0].translate(TEXTS, **settings)
        for changes, n_best in (({}, 1), ({'prefix': 'Die'}, 1), ({'beam_size': 4, 'patience': 1.0}, 3)):
            asked.clear()
            ways = shipped[1].translate_n_best(TEXTS, n_best, **settings | changes)
            assert all(asked) and not math.isnan(ways[0][0].log_prob)
            assert not changes == {} or [way[0].text for way in ways] == texts


@pytest.mark.parametrize('compute_type', ['float32', 'int8', 'int8_float32'])
def test_text_is_the_same_with_and_without_scores(compute_type):
    translator = Translator.load(SHIPPED, 'cpu', 'ctranslate2', compute_type)
    texts = [pair.src for pair in toy_ende('test', n=300)]
    for beam_size in (1, 4):
        ways = translator.translate_n_best(texts, 1, beam_size=beam_size, patience=1.0)
        assert translator.translate(texts, beam_size=beam_size, patience=1.0) == [way[0].text for way in ways]


def test_threads_share_an_engine(shipped):
    expected = shipped[0].translate(TEXTS[:20])
    results = [None] * 4
    def work(i):
        results[i] = shipped[1].translate(TEXTS[:20])
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


@pytest.mark.parametrize('compute_type', ['int8', 'int8_float32'])
def test_eight_bits_change_little(shipped, compute_type):
    small = Translator.load(SHIPPED, 'cpu', 'ctranslate2', compute_type)
    assert small.engine.name == f'CTranslate2 in {compute_type}'
    same = sum(a == b for a, b in zip(small.translate(TEXTS), shipped[0].translate(TEXTS)))
    assert same >= 55


# --- what PyTorch has to do

@pytest.mark.parametrize('call, reason', [
    (lambda t: t.attention(TEXTS[0], 'Der'), 'attention maps'), (lambda t: t.sample(TEXTS[0], seed=1), 'a seed'),
    (lambda t: t.translate(TEXTS[0], min_length=20), 'min_length')], ids=['maps', 'seed', 'min_length'])
def test_one_line_says_that_pytorch_computes(shipped, cache, call, reason):
    with pytest.warns(UserWarning, match=f'Falling back to PyTorch: CTranslate2 does not support .*{reason}') as caught:
        call(shipped[1])
    assert len(caught) == 1
    with warnings.catch_warnings(): # CTranslate2 was not requested
        warnings.simplefilter('error')
        call(Translator.load(SHIPPED, 'cpu', 'auto'))


@pytest.mark.parametrize('d_model, compute_type, n_workers', [
    (128, 'float32', 2), (256, 'float32', 1), (256, 'int8', 2), (512, 'int8', 2), (512, 'int8_float32', 2)])
def test_wide_models_in_float32_divide_products_others_batches(tmp_path, monkeypatch, d_model, compute_type, n_workers):
    config = replace(PAPER, d_model=d_model, d_ff=8, n_heads=4)
    write_model(tmp_path, config)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    monkeypatch.setattr(torch, 'set_num_threads', lambda n: None) # the other tests keep theirs
    engine = Translator.load(tmp_path, 'cpu', 'ctranslate2', compute_type).engine
    assert engine.translator.num_translators == engine.n_workers == n_workers


@pytest.mark.parametrize('compute_type', ['float16', 'int8_float16'])
def test_a_gpu_has_one_worker(tmp_path, monkeypatch, compute_type):
    library = argparse.Namespace(
        get_supported_compute_types=lambda kind: {compute_type} if kind == 'cuda' else set(),
        Translator=lambda folder, **options: options)
    monkeypatch.setattr(engines, 'ctranslate2_library', lambda: library)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 16)
    monkeypatch.setattr(torch, 'set_num_threads', lambda n: None)
    engine = CTranslate2Engine(tmp_path, build_model(PAPER), WORDS, 'cuda:1', compute_type)
    assert engine.translator == {'device': 'cuda', 'device_index': 1, 'compute_type': compute_type,
                                 'inter_threads': 1, 'intra_threads': 16}


def test_pytorch_keeps_its_threads(cache):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        Translator.load(engine='ctranslate2')
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_batch_is_divided_among_the_workers(shipped, monkeypatch):
    sizes = []
    engine = shipped[1].engine
    monkeypatch.setattr(engine, 'n_workers', 2)

    class Recorder:
        def translate_batch(self, rows, *args, max_batch_size, **options):
            sizes.append(max_batch_size)
            return original.translate_batch(rows, *args, max_batch_size=max_batch_size, **options)

    original = engine.translator
    monkeypatch.setattr(engine, 'translator', Recorder())
    for n in (1, 8, 32, 64):
        engine.beam_search([[5, 6, EOS]] * n, DecodingConfig(beam_size=1))
    assert sizes == [1, 4, 16, 32]


def test_a_seed_repeats_draws(shipped):
    with pytest.warns(UserWarning, match='a seed'):
        assert shipped[1].sample(TEXTS, seed=3) == shipped[0].sample(TEXTS, seed=3)


@pytest.mark.parametrize('config, reason', [
    (RelativeConfig(**SIZES, positions='alibi'), "positions='alibi'"), (replace(PAPER, d_k=5), 'd_k=5'),
    (RecurrentConfig(len(WORDS), d_model=8, n_layers=1), "kind='recurrent'")], ids=['alibi', 'd_k', 'recurrent'])
def test_models_that_ctranslate2_cannot_represent(tmp_path, config, reason):
    folder = write_model(tmp_path / 'model', config)
    expected = Translator.load(folder, 'cpu').translate('w1 w2')
    for engine in ('ctranslate2', 'auto'):
        with pytest.warns(UserWarning, match=f'PyTorch translates in float32, not CTranslate2: {reason}') as caught:
            found = Translator.load(folder, 'cpu', engine)
            assert found.translate('w1 w2') == expected
        assert len(caught) == 1 and found.engine.name == 'PyTorch'


def test_the_command_line_says_once_that_pytorch_translates(tmp_path, capsys):
    from annotated_transformer.cli import main
    folder = write_model(tmp_path / 'model', RelativeConfig(**SIZES, positions='alibi'))
    main(['translate', '--model', str(folder), '--device', 'cpu', 'w1 w2', 'w3 w4'])
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 2
    assert found.err.count('PyTorch translates in float32, not CTranslate2') == found.err.count('alibi') == 1


def test_auto_chooses_what_is_installed(monkeypatch):
    assert Translator.load(SHIPPED, 'cpu').engine.name == 'PyTorch'
    assert Translator.load(SHIPPED, 'cpu', 'auto').engine.name == 'CTranslate2 in float32'
    assert Translator.from_pretrained(SHIPPED, device='cpu', engine='auto').engine.name == 'CTranslate2 in float32'
    monkeypatch.setitem(sys.modules, 'ctranslate2', None)
    with warnings.catch_warnings(): # nothing to warn of: no CTranslate2 was replaced
        warnings.simplefilter('error')
        assert Translator.load(SHIPPED, 'cpu', 'auto').engine.name == 'PyTorch'
    for options in (['ctranslate2'], ['auto', 'int8']):
        with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[ctranslate2\]'"):
            Translator.load(SHIPPED, 'cpu', *options)


def test_a_device_without_ctranslate2():
    obstacle = engines.ctranslate2_obstacle(Translator.load(SHIPPED, 'cpu').model, 'mps')
    assert 'mps' in str(obstacle)


def test_unknown_names():
    with pytest.raises(ValueError, match="engine='onnx' is unknown: choose one of auto, pytorch, ctranslate2"):
        Translator.load(SHIPPED, 'cpu', 'onnx')
    with pytest.raises(ValueError, match="compute_type='int4' is unknown: choose one of float32, int8, "):
        Translator.load(SHIPPED, 'cpu', 'auto', 'int4')
    with pytest.raises(ValueError, match="compute_type='int8' needs engine='ctranslate2'"):
        Translator.load(SHIPPED, 'cpu', 'pytorch', 'int8')
    if 'float16' not in ctranslate2.get_supported_compute_types('cpu'):
        with pytest.raises(ValueError, match="'float16' is not supported on this cpu: choose one of float32, int8"):
            Translator.load(SHIPPED, 'cpu', 'ctranslate2', 'float16')


# --- conversions

LINES = [f'w{i} w{i + 1} w{3 * i}' for i in range(12)]


def conversions(folder):
    return sorted(path.name for path in Path(folder).glob('*ctranslate2*'))


def test_a_model_is_converted_once_and_anew_when_its_weights_change(tmp_path, monkeypatch):
    folder = write_model(tmp_path / 'model')
    first = Translator.load(folder, 'cpu', 'ctranslate2').translate(LINES)
    names = conversions(folder)
    assert len(names) == 1
    def fail(*args):
        raise AssertionError('converted again')
    with monkeypatch.context() as patch:
        patch.setattr(engines, 'export_ctranslate2', fail)
        assert Translator.load(folder, 'cpu', 'ctranslate2').translate(LINES) == first
    write_model(folder, seed=5)
    again = Translator.load(folder, 'cpu', 'ctranslate2')
    assert again.translate(LINES) == Translator.load(folder, 'cpu').translate(LINES) != first
    assert len(conversions(folder)) == 1 and conversions(folder) != names # the old conversion is gone


def test_the_package_and_read_only_folders_use_the_cache(tmp_path, cache, monkeypatch):
    assert converted_folder(SHIPPED).parent == cache and not conversions(SHIPPED)
    folder = write_model(tmp_path / 'model')
    export = engines.export_ctranslate2
    def read_only(source, target):
        if target.parent == folder:
            raise OSError(30, 'Read-only file system')
        return export(source, target)
    monkeypatch.setattr(engines, 'export_ctranslate2', read_only)
    assert converted_folder(folder).parent == cache and not conversions(folder)


def test_an_interrupted_conversion_leaves_nothing(tmp_path, cache, monkeypatch):
    folder = write_model(tmp_path / 'model')
    def full(source, target):
        target.mkdir(parents=True)
        (target / 'model.bin').write_bytes(b'half')
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(engines, 'export_ctranslate2', full)
    with pytest.raises(OSError, match='No space left'):
        converted_folder(folder)
    assert not conversions(folder) and not conversions(cache)
    assert not [path for path in folder.iterdir() if path.name.startswith('.')]


def test_two_processes_may_convert_at_once(tmp_path, monkeypatch):
    folder = write_model(tmp_path / 'model')
    export = engines.export_ctranslate2
    def slow(source, target):
        if len(started) == 1: # the other process finishes first
            started.append(2)
            converted_folder(folder)
        return export(source, target)
    started = [1]
    monkeypatch.setattr(engines, 'export_ctranslate2', slow)
    assert engines.check_conversion(converted_folder(folder))
    assert len(conversions(folder)) == 1


@pytest.mark.parametrize('name', ['model.bin', 'config.json', 'shared_vocabulary.json', 'checksums.json'])
@pytest.mark.parametrize('fault', ['missing', 'truncated', 'one bit'])
def test_a_damaged_conversion_is_named(tmp_path, name, fault):
    folder = write_model(tmp_path / 'model')
    path = converted_folder(folder) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if fault != 'missing':
        path.write_bytes(content if fault == 'one bit' else content[:30])
    for engine in ('auto', 'ctranslate2'):
        with pytest.raises(ValueError, match='model/ctranslate2-.* is damaged .*: delete this folder') as caught:
            Translator.load(folder, 'cpu', engine)
        assert '\n' not in str(caught.value)
    assert Translator.load(folder, 'cpu', 'pytorch').engine.name == 'PyTorch'
    shutil.rmtree(path.parent)
    assert Translator.load(folder, 'cpu', 'auto').engine.name == 'CTranslate2 in float32'
