"ONNX files: onnxruntime computes what PyTorch computes, in the searches and in programs that know nothing of this package."
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from annotated_transformer import onnx_export
from annotated_transformer.attention_maps import attention_maps
from annotated_transformer.batches import pad_rows
from annotated_transformer.checkpoints import build_model
from annotated_transformer.heads import Head, prune_heads
from annotated_transformer.inference import beam_search, greedy, sample
from annotated_transformer.marian import MarianConfig
from annotated_transformer.model_commands import Export
from annotated_transformer.onnx_export import OnnxModel, export_onnx
from annotated_transformer.recurrent import RecurrentConfig
from annotated_transformer.relative_positions import RelativeConfig
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.transformer import TransformerConfig
from annotated_transformer.translator import SHIPPED, Translator
from annotated_transformer.vocabulary import BOS, EOS, PAD, SPECIALS, WordTokenizer

pytestmark = pytest.mark.skipif(not all(map(find_spec, ('onnx', 'onnxruntime', 'onnxscript'))),
                                reason='the extra `onnx` is not installed')
WORDS = WordTokenizer([*SPECIALS, *[f'w{i}' for i in range(40)]], ('en', 'de'))
SIZES = {'vocab_size': len(WORDS), 'n_layers': 1, 'd_model': 16, 'd_ff': 24, 'n_heads': 4, 'max_len': 30}


@pytest.fixture(scope='module')
def shipped(tmp_path_factory):
    "The shipped model in ONNX, with attention weights: half a minute. (Page 71 exports it as well.)"
    return export_onnx(SHIPPED, tmp_path_factory.mktemp('onnx') / 'shipped', attention_weights=True)


@pytest.fixture(scope='module')
def src():
    return pad_rows(Translator.load(device='cpu').encode([pair.src for pair in toy_ende('test', n=100)]))


def random_model(config):
    torch.manual_seed(0)
    model = build_model(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    return model


def assert_same_searches(model, exported, src, **options):
    for search in (greedy, beam_search):
        for ours, theirs in zip(search(model, src, **options), search(exported, src, **options), strict=True):
            ours, theirs = [found if isinstance(found, list) else [found] for found in (ours, theirs)]
            assert [h.ids for h in theirs] == [h.ids for h in ours]
            assert [h.log_prob for h in theirs] == pytest.approx([h.log_prob for h in ours], abs=1e-4)


@pytest.mark.slow
def test_100_sentences_give_the_same_tokens_and_log_probabilities(shipped, src):
    model = Translator.load(device='cpu').model
    exported = OnnxModel(shipped)
    assert_same_searches(model, exported, src)
    assert_same_searches(model, exported, src[:1])       # one sentence, without padding
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    drawn = [sample(m, src[:20], generator=seed) for m, seed in zip((model, exported), seeds)]
    assert [h.ids for h in drawn[1]] == [h.ids for h in drawn[0]]


ALL_OF_A_LAYER = [Head('decoder.layers.0.self_attention', i) for i in range(4)]
SOME_HEADS = [Head('decoder.layers.1.cross_attention', 2), Head('encoder.layers.0.self_attention', 0)]


@pytest.mark.slow
@pytest.mark.parametrize('config, pruned', [
    (TransformerConfig(**SIZES | {'n_layers': 2}, norm='pre', positions='learned', d_k=3, d_v=5),
     ALL_OF_A_LAYER + SOME_HEADS),
    (RelativeConfig(**SIZES, positions='rotary'), []),
    (MarianConfig(**SIZES, scale_embedding=False), []),
], ids=['pre-norm, learned positions, d_k and d_v, pruned', 'rotary', 'marian'])
def test_other_kinds_of_models(tmp_path, config, pruned):
    model = random_model(config)
    if pruned:
        model = prune_heads(model, pruned)
    Translator(model, WORDS).save(tmp_path / 'model')
    exported = OnnxModel(export_onnx(tmp_path / 'model', tmp_path / 'onnx'))
    rows = [[*torch.randint(4, len(WORDS), (1 + i % 7,)).tolist(), EOS] for i in range(20)]
    assert_same_searches(model, exported, pad_rows(rows), max_extra_tokens=9)
    names = [tensor.name for tensor in exported.encoder.get_outputs() + exported.decoder.get_outputs()]
    assert names == ['src_mask', 'src_keys', 'src_values', 'logits', 'keys', 'values']


@pytest.mark.slow
def test_attention_weights(shipped, src):
    "The optional outputs are what `attention_maps` records in PyTorch."
    model = Translator.load(device='cpu').model
    exported = OnnxModel(shipped)
    row = src[:1, :(src[0] != PAD).sum()]
    tgt = torch.tensor([[BOS, *greedy(model, row)[0].ids]])
    encoder, decoder, cross = attention_maps(model, row, tgt)
    state = exported.decoder_state(row)
    [found] = exported.encoder.run(['encoder_attention'], {'src': row.numpy()})
    np.testing.assert_allclose(found[0], encoder.flatten(0, 1), atol=1e-5)
    for i in range(tgt.size(1)):
        inputs = {'tokens': tgt[:, i:i + 1].numpy(), **state.source, **state.past}
        own, other = exported.decoder.run(['self_attention', 'cross_attention'], inputs)
        np.testing.assert_allclose(own[0, 0], decoder.flatten(0, 1)[:, i, :i + 1], atol=1e-5)
        np.testing.assert_allclose(other[0, 0], cross.flatten(0, 1)[:, i], atol=1e-5)
        state.logits(tgt[:, i:i + 1])


@pytest.mark.slow
def test_files_need_nothing_of_this_package(shipped, src):
    "A valid ONNX file with named axes, and a greedy search that imports onnxruntime and numpy alone."
    import onnx
    for name in onnx_export.GRAPHS:
        onnx.checker.check_model(onnx.load(shipped / name), full_check=True)
    shapes = {tensor.name: tensor.shape for tensor in OnnxModel(shipped).decoder.get_inputs()}
    assert shapes['tokens'] == ['sentences', 'hypotheses'] and shapes['src_mask'] == ['sentences', 'source']
    assert shapes['past_keys'] == ['sentences', 'hypotheses', 8, 'past', 32]
    row = src[0, :(src[0] != PAD).sum()].tolist()
    program = f'''
import sys, numpy as np, onnxruntime as ort
folder, src = sys.argv[1], np.array([{row}])
encoder, decoder = (ort.InferenceSession(f'{{folder}}/{{name}}.onnx') for name in ('encoder', 'decoder'))
mask, keys, values = encoder.run(['src_mask', 'src_keys', 'src_values'], {{'src': src}})
past_keys = past_values = np.zeros((1, 1, 8, 0, 32), np.float32)
token, ids = 1, []
while token != 2:
    logits, past_keys, past_values = decoder.run(['logits', 'keys', 'values'], {{
        'tokens': np.array([[token]]), 'src_mask': mask, 'src_keys': keys, 'src_values': values,
        'past_keys': past_keys, 'past_values': past_values}})
    token = int(logits[0, 0, 2:].argmax()) + 2
    ids.append(token)
assert not [name for name in sys.modules if name.startswith(('torch', 'annotated'))]
print(ids[:-1])
'''
    found = subprocess.run([sys.executable, '-c', program, str(shipped)], capture_output=True, text=True)
    assert found.stderr == ''
    assert json.loads(found.stdout) == greedy(Translator.load(device='cpu').model, src[:1])[0].ids


@pytest.mark.slow
def test_a_wrong_graph_is_refused_and_leaves_no_folder(tmp_path, shipped, monkeypatch):
    "The export compares its files with the model before they take their names."
    def copy(model, folder, attention_weights):
        for name in onnx_export.GRAPHS:
            shutil.copy(shipped / name, folder)

    monkeypatch.setattr(onnx_export, 'write_graphs', copy)
    assert export_onnx(SHIPPED, tmp_path / 'right') == tmp_path / 'right'
    translator = Translator.load(device='cpu')
    with torch.no_grad():
        translator.model.decoder.layers[1].cross_attention.q_proj.bias.add_(0.1)
    translator.save(tmp_path / 'model')
    with pytest.raises(ValueError, match='the exported graphs are wrong: log-probabilities differ by .* at token 0'):
        export_onnx(tmp_path / 'model', tmp_path / 'out')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['model', 'right']


def test_what_cannot_be_exported(tmp_path):
    torch.manual_seed(0)
    model = build_model(RecurrentConfig(vocab_size=len(WORDS), d_model=8, n_layers=1))
    Translator(model, WORDS).save(tmp_path / 'recurrent')
    with pytest.raises(ValueError, match="kind='recurrent' has no key/value cache: ONNX export needs a Transformer"):
        export_onnx(tmp_path / 'recurrent', tmp_path / 'out')
    with pytest.raises(FileExistsError, match='recurrent'):
        export_onnx(SHIPPED, tmp_path / 'recurrent')
    with pytest.raises(FileNotFoundError, match='nothing'):
        export_onnx(tmp_path / 'nothing', tmp_path / 'out')
    assert [path.name for path in tmp_path.iterdir()] == ['recurrent']


@pytest.mark.slow
def test_damaged_and_missing_files_are_named(tmp_path, shipped, src):
    folder = tmp_path / 'onnx'
    shutil.copytree(shipped, folder)
    (folder / 'decoder.onnx').write_bytes((folder / 'decoder.onnx').read_bytes()[:1000])
    with pytest.raises(ValueError, match='decoder.onnx is damaged: export the model again'):
        OnnxModel(folder)
    (folder / 'encoder.onnx').unlink()
    with pytest.raises(FileNotFoundError, match='has no encoder.onnx: write it with annotated-transformer export --to onnx'):
        OnnxModel(folder)
    with pytest.raises(ValueError, match='max_len'):
        OnnxModel(shipped).decoder_state(torch.full((1, 600), 5))


@pytest.mark.parametrize('missing', ['onnx', 'onnxruntime', 'onnxscript'])
def test_without_the_extra(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"this needs ONNX: pip install 'annotated_transformer\[onnx\]'"):
        export_onnx(SHIPPED, tmp_path / 'out')


def test_command(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(onnx_export, 'export_onnx', lambda *arguments: calls.append(arguments))
    Export(SHIPPED, to='onnx', out=tmp_path / 'out', attention_weights=True)()
    assert calls == [(SHIPPED, tmp_path / 'out', True)] and 'is written' in capsys.readouterr().out
    with pytest.raises(ValueError, match='only available with --to ctranslate2: onnx stores float32'):
        Export(SHIPPED, to='onnx', out=tmp_path / 'out', quantization='int8')()
    with pytest.raises(ValueError, match='--attention-weights is only available with --to onnx'):
        Export(SHIPPED, to='marian', out=tmp_path / 'out', attention_weights=True)()
