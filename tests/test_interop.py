"Models that leave and enter: the same numbers and tokens in PyTorch, transformers and CTranslate2."
import json
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from torch import nn

transformers = pytest.importorskip('transformers', reason='compares with transformers, which is not installed')
ctranslate2 = pytest.importorskip('ctranslate2', reason='compares with CTranslate2, which is not installed')
pytest.importorskip('sentencepiece', reason='Marian models need sentencepiece, which is not installed')

from marian_folders import PAIRS, random_sources, random_targets, write_marian

from annotated_transformer import interop
from annotated_transformer.checkpoints import build_model
from annotated_transformer.cli import parse_values
from annotated_transformer.inference import DecodingConfig
from annotated_transformer.interop import (export_ctranslate2, export_marian, from_torch_transformer, import_marian,
                                           to_torch_transformer)
from annotated_transformer.marian import MarianConfig
from annotated_transformer.relative_positions import RelativeConfig
from annotated_transformer.recurrent import RecurrentConfig
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.transformer import TransformerConfig
from annotated_transformer.translator import SHIPPED, Translator
from annotated_transformer.vocabulary import (BOS, EOS, PAD, SPECIALS, UNKNOWN, BytePairTokenizer, WordTokenizer,
                                              load_tokenizer)

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.filterwarnings('ignore:Recommended. pip install sacremoses', 'ignore:enable_nested_tensor')
BPE = BytePairTokenizer.train(
    [(lang, [pair[side] for pair in PAIRS]) for side, lang in enumerate(('en', 'de'))], vocab_size=250)
SIZES = {'vocab_size': len(BPE), 'n_layers': 2, 'd_model': 32, 'd_ff': 48, 'n_heads': 4, 'dropout': 0.1, 'max_len': 64}
PAPER = TransformerConfig(**SIZES)


@torch.no_grad()
def random_model(config):
    "A model whose biases and gains are random too."
    torch.manual_seed(0)
    model = build_model(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def write_model(folder, config=PAPER, tokenizer=BPE, **search):
    "Write a model folder with decoding settings; return its translator."
    translator = Translator(random_model(config), tokenizer, {'decoding': search} if search else {})
    translator.save(folder)
    return translator


def assert_same_model(model, other):
    assert model.config == other.config
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# --- torch.nn.Transformer

@pytest.mark.parametrize('config', [PAPER, replace(PAPER, norm='pre'), replace(PAPER, positions='learned', n_heads=1),
                                    MarianConfig(**SIZES), MarianConfig(**SIZES, activation='gelu')], ids=str)
@torch.no_grad()
def test_pytorchs_module_gives_the_same_hidden_states(config):
    model = random_model(config)
    module = to_torch_transformer(model)
    src = random_sources(len(BPE), 4)
    tgt = random_targets(len(BPE), 4)
    scale = config.d_model ** 0.5
    found = module(model.src_positions(model.src_embed(src) * scale), model.tgt_positions(model.tgt_embed(tgt) * scale),
                   tgt_mask=torch.ones(tgt.size(1), tgt.size(1)).triu(1).bool(),
                   src_key_padding_mask=src == PAD, memory_key_padding_mask=src == PAD)
    torch.testing.assert_close(found, model.hidden_states(src, tgt), atol=1e-5, rtol=1e-5)
    if type(config) is TransformerConfig:
        back = from_torch_transformer(module.train(), len(BPE), positions=config.positions, max_len=64)
        assert back.training and back.config == config
        for name, parameter in back.named_parameters():
            if name.startswith(('encoder', 'decoder')):
                assert torch.equal(parameter, model.get_parameter(name)), name
    assert to_torch_transformer(model.double()).decoder.layers[0].linear1.weight.dtype == torch.float64


@torch.no_grad()
def test_pytorchs_own_pre_norm_module_comes_in():
    theirs = nn.Transformer(16, 4, 2, 2, 8, norm_first=True).eval()
    ours = from_torch_transformer(theirs, 10)
    src = torch.randn(7, 3, 16)                                        # PyTorch's default order: positions first
    tgt = torch.randn(5, 3, 16)
    found = ours.decoder(tgt.transpose(0, 1), ours.encoder(src.transpose(0, 1)))
    torch.testing.assert_close(theirs(src, tgt), found.transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('changes, message', [
    ({'norm_first': False}, 'must end in a layer norm if it is pre-norm, and only then'),
    ({'num_decoder_layers': 3}, 'the layers of encoder and decoder differ'), ({'bias': False}, 'bias=False'),
    ({'layer_norm_eps': 1e-6}, 'layer_norm_eps=1e-06'), ({'activation': 'gelu'}, 'is not ReLU')], ids=str)
def test_a_module_that_our_model_cannot_represent(changes, message):
    sizes = {'d_model': 16, 'nhead': 4, 'num_encoder_layers': 2, 'num_decoder_layers': 2, 'dim_feedforward': 24,
             'norm_first': True}
    with pytest.raises(ValueError, match=message):
        from_torch_transformer(nn.Transformer(**sizes | changes), 10)


# --- Marian in

@pytest.fixture(scope='module')
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp('hub') / 'model'
    write_marian(folder, ends=True)
    return folder


@pytest.fixture(scope='module')
def imported(hub, tmp_path_factory):
    return import_marian(hub, tmp_path_factory.mktemp('imported') / 'model')


def translate_with_transformers(folder, texts):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    batch = tokenizer(texts, return_tensors='pt', padding=True, return_token_type_ids=False)
    with torch.no_grad():
        return tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)


def test_an_imported_model_translates_as_transformers_does(hub, imported):
    texts = [src for src, _ in PAIRS[:60]]
    translator = Translator.load(imported, 'cpu')
    assert translator.decoding == DecodingConfig(beam_size=4, length_penalty=1.0, length_penalty_offset=0.0)
    ours = [text.replace(UNKNOWN, '').split() for text in translator.translate(texts)] # transformers drops unknown
    assert ours == [text.split() for text in translate_with_transformers(hub, texts)]
    assert len(set(map(tuple, ours))) > 3 and max(map(len, ours)) < 50


@pytest.mark.parametrize('theirs, ours', [
    ({}, {'beam_size': 1, 'length_penalty': 1.0}),
    ({'num_beams': 6, 'length_penalty': 0.6, 'early_stopping': True},
     {'beam_size': 6, 'length_penalty': 0.6, 'patience': 1.0}),
    ({'num_beams': 2, 'min_length': 4, 'no_repeat_ngram_size': 3},
     {'beam_size': 2, 'length_penalty': 1.0, 'min_length': 3, 'no_repeat_ngram_size': 3}),
    ({'min_new_tokens': 4, 'early_stopping': 'never', 'num_beams': None},
     {'beam_size': 1, 'length_penalty': 1.0, 'min_length': 4})], ids=str)
@pytest.mark.parametrize('name', ['generation_config.json', 'config.json'])
def test_search_settings_come_along(tmp_path, name, theirs, ours):
    (tmp_path / 'generation_config.json').write_text(json.dumps(theirs if name.startswith('gen') else {}))
    found, forbidden = interop.read_generation(tmp_path / 'generation_config.json',
                                               {} if name.startswith('gen') else theirs)
    assert DecodingConfig(**found) == DecodingConfig(length_penalty_offset=0.0, **ours) and forbidden == ()


def test_search_settings_that_we_do_not_have(tmp_path):
    path = tmp_path / 'generation_config.json'
    path.write_text('{"repetition_penalty": 1.3, "bad_words_ids": [[7], [9]]}')
    with pytest.warns(UserWarning, match='repetition_penalty=1.3 is not kept'):
        assert interop.read_generation(path, {})[1] == (7, 9)
    for fields, message in [({'bad_words_ids': [[7, 8]]}, 'may only hold single tokens'), ({'num_beams': 0}, 'beam_size=0'),
                            ({'length_penalty': -1.0}, 'length_penalty=-1.0')]:
        path.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=f'generation_config.json: .*{message}'):
            interop.read_generation(path, {})


@pytest.mark.parametrize('fields, message', [
    ({}, None), ({'early_stopping': False}, "early_stopping=False is not kept: our search offers only True or 'never'"),
    ({'early_stopping': False, 'num_beams': 1}, None),
    ({'renormalize_logits': False}, 'renormalize_logits=False is not kept'),
    ({'max_length': 60}, 'max_length is not kept')],
    ids=str)
def test_settings_that_may_change_tokens_give_a_warning(tmp_path, fields, message):
    kept = {'num_beams': 4, 'early_stopping': 'never', 'renormalize_logits': True, 'max_length': 64}
    (tmp_path / 'generation_config.json').write_text(json.dumps(kept | fields))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        interop.read_generation(tmp_path / 'generation_config.json', {'max_position_embeddings': 64})
    assert [message in str(warning.message) for warning in caught] == ([True] if message else [])


# --- Marian out

@pytest.mark.parametrize('config', [
    PAPER, replace(PAPER, tied=False, n_layers=3, n_heads=1), replace(PAPER, d_k=8), MarianConfig(**SIZES),
    MarianConfig(**SIZES, activation='gelu', scale_embedding=False, tied=False)], ids=str)
def test_an_exported_model_gives_the_same_logits_and_comes_back(tmp_path, config):
    search = {'beam_size': 6, 'min_length': 4, 'no_repeat_ngram_size': 2}
    translator = write_model(tmp_path / 'ours', config, **search)
    with pytest.warns(UserWarning, match='no length_penalty_offset=5'):
        export_marian(tmp_path / 'ours', tmp_path / 'marian')
    theirs, info = transformers.MarianMTModel.from_pretrained(tmp_path / 'marian', output_loading_info=True)
    assert not any(info[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), info
    src = random_sources(len(BPE), 6)
    tgt = random_targets(len(BPE), 6)
    back = Translator.load(import_marian(tmp_path / 'marian', tmp_path / 'back'), 'cpu')
    with torch.no_grad():
        ours = translator.model(src, tgt)
        found = theirs.eval()(input_ids=src, attention_mask=(src != PAD).long(), decoder_input_ids=tgt).logits
        torch.testing.assert_close(found, ours, atol=2e-5, rtol=1e-4)
        again = back.model(src, tgt)
    torch.testing.assert_close(again[..., EOS:], ours[..., EOS:], atol=2e-5, rtol=1e-4)
    assert back.decoding == DecodingConfig(**search, length_penalty_offset=0.0)
    assert back.tokenizer.state() == BPE.state()
    texts = [src for src, _ in PAIRS[:50]] + ['<eos> </s>', '']
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'marian')
    assert their_tokenizer(texts)['input_ids'] == [row + [EOS] for row in BPE.encode_batch(texts)]
    with torch.no_grad():
        rows = theirs.generate(src, attention_mask=(src != PAD).long(), max_new_tokens=9).tolist()
    for row in rows:
        ids = [i for i in row[1:] if i not in (PAD, EOS)]
        assert len(ids) >= 4 and len(set(zip(ids, ids[1:]))) == len(ids) - 1  # long enough, and no bigram twice


def test_the_shipped_model_translates_in_transformers(tmp_path):
    translator = Translator.load(SHIPPED, 'cpu')
    translator.training = {'decoding': {'length_penalty': 1.0, 'length_penalty_offset': 0.0}}
    translator.save(tmp_path / 'ours')
    texts = [pair.src for pair in toy_ende('test', n=8)]
    assert translate_with_transformers(export_marian(tmp_path / 'ours', tmp_path / 'out'), texts) == (
        translator.translate(texts))


def test_what_came_in_goes_out_bit_for_bit(hub, imported, tmp_path):
    first = Translator.load(imported, 'cpu')
    export_marian(imported, tmp_path / 'out')
    texts = [src for src, _ in PAIRS[:30]]
    assert translate_with_transformers(tmp_path / 'out', texts) == translate_with_transformers(hub, texts)
    for name in (interop.OWN_TOKENIZER, 'none'):       # with our tokenizer's file, and with the .spm files alone
        (tmp_path / 'out' / name).unlink(missing_ok=True)
        again = Translator.load(import_marian(tmp_path / 'out', tmp_path / f'without {name}'), 'cpu')
        assert again.tokenizer.tokens(range(len(again.tokenizer))) == first.tokenizer.tokens(range(len(first.tokenizer)))
        for p, q in zip(again.model.parameters(), first.model.parameters(), strict=True):
            assert torch.equal(p[EOS:], q[EOS:]) if len(p) == len(first.tokenizer) else torch.equal(p, q)


def test_a_model_with_a_word_tokenizer_goes_out_with_ids_only(tmp_path):
    words = WordTokenizer.train([('en', [src for src, _ in PAIRS])], 60)
    words.langs = ('en', 'de')
    write_model(tmp_path / 'ours', replace(PAPER, vocab_size=len(words)), words, length_penalty_offset=0.0, patience=2.0)
    with pytest.warns(UserWarning, match='no patience=2'):
        out = export_marian(tmp_path / 'ours', tmp_path / 'marian')
    assert not (out / 'tokenizer_config.json').exists()
    assert load_tokenizer(import_marian(out, tmp_path / 'back') / 'tokenizer.json').state() == words.state()


# --- CTranslate2

@pytest.mark.parametrize('config', [
    PAPER, replace(PAPER, norm='pre', n_layers=3), replace(PAPER, positions='learned', tied=False),
    replace(PAPER, positions='none', n_heads=1), RelativeConfig(**SIZES), RelativeConfig(**SIZES | {'norm': 'pre'}),
    MarianConfig(**SIZES), MarianConfig(**SIZES, activation='gelu', scale_embedding=False)], ids=str)
def test_ctranslate2_gives_our_log_probabilities(tmp_path, config):
    model = write_model(tmp_path / 'ours', config).model
    out = export_ctranslate2(tmp_path / 'ours', tmp_path / 'served')
    sources = [[i for i in row if i not in (PAD, EOS)] for row in random_sources(len(BPE), 12).tolist()]
    targets = random_targets(len(BPE), 12)[:, 1:].tolist()
    scores = ctranslate2.Translator(str(out), intra_threads=1).score_batch(
        [BPE.tokens(row) for row in sources], [BPE.tokens(row) for row in targets])
    for source, target, found in zip(sources, targets, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([source + [EOS]]), torch.tensor([[BOS] + target]))[0]
        logits[:, [PAD, BOS]] = -torch.inf
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(target + [EOS])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.log_probs), wanted, atol=1e-4, rtol=1e-4)


# point 8 of the trial of 0.1.0
def test_your_own_program_translates_as_we_do_with_the_stated_settings(tmp_path):
    words = [pair.src.split() for pair in toy_ende('test_long', n=60)]
    hard = [' '.join(row[1::2] + row[::2]) for row in words] # on easy sentences, all settings agree
    folder = export_ctranslate2(SHIPPED, tmp_path / 'exported')
    tokenizer = load_tokenizer(folder / 'tokenizer.json')
    program = ctranslate2.Translator(str(folder), intra_threads=1)
    rows = [tokenizer.tokens(ids) for ids in tokenizer.encode_batch(hard, 'en')]
    def decoded(**settings):
        return [tokenizer.join(result.hypotheses[0]) for result in program.translate_batch(rows, **settings)]
    ours, theirs = 'length_penalty=1, length_penalty_offset=0, patience=1', 'length_penalty=1, patience=1'
    options = '--length-penalty 1 --length-penalty-offset 0 --beam-patience 1'
    guide, page = [(ROOT / 'nbs' / name).read_text(encoding='utf-8')
                   for name in ('34_your_own_data.ipynb', '33_other_implementations.ipynb')]
    assert options in guide and options in page and ours in page and f'beam_size=4, {theirs}' in guide
    _, command = parse_values(['translate', *options.split(), 'A sentence.'])
    settings = {'length_penalty': command['length_penalty'], 'patience': command['beam_patience'],
                'length_penalty_offset': command['length_penalty_offset']}
    assert settings == eval(f'dict({ours})')
    translator = Translator.load(device='cpu', engine='pytorch')
    expected = translator.translate(hard, beam_size=4, **settings)
    differ = sum(a != b for a, b in zip(decoded(beam_size=4, **eval(f'dict({theirs})')), expected, strict=True))
    assert differ <= 1
    assert sum(a != b for a, b in zip(decoded(beam_size=4), translator.translate(hard))) >= 5 # the defaults differ


# point 8 of the trial of 0.1.0
def test_your_own_program_reads_the_tokenizer_without_pytorch(tmp_path):
    folder = export_ctranslate2(SHIPPED, tmp_path / 'exported')
    code = ('import sys; from annotated_transformer.vocabulary import load_tokenizer; '
            'tokenizer = load_tokenizer(sys.argv[1]); ids = tokenizer.encode("The dog sleeps.", "en"); '
            'print(tokenizer.decode(ids), "torch" in sys.modules)')
    done = subprocess.run([sys.executable, '-c', code, folder / 'tokenizer.json'], capture_output=True, text=True)
    assert done.stdout.strip() == 'The dog sleeps. False', done.stderr
    stored = json.loads((folder / 'tokenizer.json').read_text(encoding='utf-8')) # what page 33 says
    assert tokenizers.Tokenizer.from_str(json.dumps(stored['tokenizer'])).get_vocab_size() == len(load_tokenizer(
        folder / 'tokenizer.json'))


@pytest.mark.parametrize('quantization', ['float32', 'float16', 'int8', 'int8_float16'])
def test_quantized_models_are_smaller_and_translate_alike(tmp_path, quantization):
    translator = Translator.load(SHIPPED, 'cpu')
    texts = [pair.src for pair in toy_ende('test', n=60)]
    tokens = [translator.tokenizer.tokens(row[:-1]) for row in translator.encode(texts)]
    out = export_ctranslate2(SHIPPED, tmp_path / 'out', quantization)
    found = ctranslate2.Translator(str(out), intra_threads=1).translate_batch(tokens)
    texts_out = [translator.tokenizer.join(result.hypotheses[0]) for result in found]
    assert sum(a == b for a, b in zip(texts_out, translator.translate(texts))) >= 54
    full_size = (SHIPPED / 'model.safetensors').stat().st_size
    share = {'float32': 1.2, 'float16': 0.6, 'int8': 0.4, 'int8_float16': 0.35}[quantization]
    assert (out / 'model.bin').stat().st_size < share * full_size


# --- what cannot be represented, and what is missing

@pytest.mark.parametrize('config, message', [
    (replace(PAPER, norm='pre'), "norm='pre': Marian can only represent 'post'"),
    (replace(PAPER, positions='learned'), "positions='learned': Marian"), (replace(PAPER, d_v=5), 'd_v=5: Marian splits'),
    (RelativeConfig(**SIZES), "kind='relative' with positions='rotary': Marian")], ids=str)
def test_marian_cannot_represent(tmp_path, config, message):
    write_model(tmp_path / 'ours', config)
    with pytest.raises(ValueError, match=message):
        export_marian(tmp_path / 'ours', tmp_path / 'out')
    assert [path.name for path in tmp_path.iterdir()] == ['ours']


@pytest.mark.parametrize('config, message', [
    (RelativeConfig(**SIZES, positions='alibi'), "positions='alibi': CTranslate2 can only represent"),
    (replace(PAPER, d_k=4), 'd_k=4: CTranslate2 splits'),
    (RecurrentConfig(len(BPE), d_model=8, n_layers=1), "kind='recurrent': CTranslate2")], ids=str)
def test_ctranslate2_cannot_represent(tmp_path, config, message):
    write_model(tmp_path / 'ours', config)
    with pytest.raises(ValueError, match=message):
        export_ctranslate2(tmp_path / 'ours', tmp_path / 'out')
    with pytest.raises(ValueError, match="quantization='int4' is unknown: choose one of int8, "):
        export_ctranslate2(tmp_path / 'ours', tmp_path / 'out', 'int4')
    assert [path.name for path in tmp_path.iterdir()] == ['ours']


@pytest.mark.parametrize('function', [import_marian, export_marian, export_ctranslate2])
def test_nothing_is_overwritten_or_left_half_written(hub, imported, tmp_path, monkeypatch, function):
    source = hub if function is import_marian else imported
    shutil.copytree(source, tmp_path / 'source')
    with pytest.raises(FileExistsError, match='choose another folder'):
        function(tmp_path / 'source', tmp_path / 'source')
    def fail(*args, **kwargs):
        raise OSError('no space left')
    monkeypatch.setattr(interop, 'atomic_write', fail)
    with pytest.raises(OSError, match='no space left'):
        function(tmp_path / 'source', tmp_path / 'out')
    assert [path.name for path in tmp_path.iterdir()] == ['source']


@pytest.mark.parametrize('function', [export_marian, export_ctranslate2])
def test_a_folder_that_is_not_a_model(tmp_path, function):
    write_model(tmp_path / 'ours')
    (tmp_path / 'ours' / 'tokenizer.json').unlink()
    with pytest.raises(FileNotFoundError, match='it has no tokenizer.json'):
        function(tmp_path / 'ours', tmp_path / 'out')
    WordTokenizer([*SPECIALS, 'a'], ('en', 'de')).save(tmp_path / 'ours' / 'tokenizer.json')
    with pytest.raises(ValueError, match='tokenizer.json has 5 tokens, the model has 250: restore'):
        function(tmp_path / 'ours', tmp_path / 'out')


def test_paths_that_are_none(tmp_path):
    "An empty name is not the current folder."
    (tmp_path / 'pairs.tsv').write_text('a\tb\n')
    for function in (export_marian, export_ctranslate2, import_marian):
        with pytest.raises(ValueError, match="='' is empty: give a name"):
            function('', tmp_path / 'out')
        with pytest.raises(ValueError, match="folder='' is empty: give a name"):
            function(SHIPPED, '')
        with pytest.raises(FileExistsError, match='pairs.tsv exists: choose another folder'):
            function(SHIPPED, tmp_path / 'pairs.tsv')
        with pytest.raises(FileNotFoundError, match='pairs.tsv is a file|pairs.tsv is not a Marian folder: it is not a folder'):
            function(tmp_path / 'pairs.tsv', tmp_path / 'out')
    with pytest.raises(ValueError, match='is of this library already: use the folder as it is'):
        import_marian(SHIPPED, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_without_the_other_libraries(hub, imported, tmp_path, monkeypatch):
    for name in ('transformers', 'ctranslate2'):
        monkeypatch.setitem(sys.modules, name, None)
    import_marian(hub, tmp_path / 'ours')
    assert Translator.load(tmp_path / 'ours', 'cpu').translate('This is a ball.')
    export_marian(tmp_path / 'ours', tmp_path / 'out')
    with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[ctranslate2\]'"):
        export_ctranslate2(tmp_path / 'ours', tmp_path / 'served')
    monkeypatch.setitem(sys.modules, 'sentencepiece', None)
    with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[marian\]'"):
        import_marian(hub, tmp_path / 'again')
    assert not (tmp_path / 'again').exists()
