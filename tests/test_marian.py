"The Marian model class and the folders of transformers: equal logits, equal ids, and clear errors."
import json
import random
import shutil

import pytest
import safetensors.torch
import torch
from jaxtyping import TypeCheckError

transformers = pytest.importorskip('transformers', reason='compares with transformers, which is not installed')
pytest.importorskip('sentencepiece', reason='Marian models need sentencepiece, which is not installed')

from marian_folders import (PAIRS, SENTENCEPIECE, UNTIED, pieces_of, random_marian, random_sources, random_targets,
                            sizes, their_ids, write_marian, write_vocabulary)

from annotated_transformer import decoding, inference, kernels, marian, training
from annotated_transformer.batches import collate
from annotated_transformer.checkpoints import load_model, save_model
from annotated_transformer.kernels import accelerate
from annotated_transformer.marian import MarianConfig, MarianTransformer
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import BOS, EOS, PAD, SPECIALS, UNK

pytestmark = pytest.mark.filterwarnings('ignore:Recommended. pip install sacremoses')
CONFIG = MarianConfig(50, n_layers=2, d_model=16, d_ff=24, n_heads=4, max_len=40, dropout=0.1)


def read(folder, forbidden=()):
    "Our model of a Marian folder, its tokenizer, and the target row of each of our ids."
    config = marian.read_marian_config(folder)
    tokenizer, src_rows, tgt_rows = marian.read_marian_tokenizer(folder, config)
    path, weights = marian.read_marian_weights(folder)
    return marian.marian_model(path, weights, config, src_rows, tgt_rows, forbidden), tokenizer, tgt_rows


@pytest.fixture(scope='module')
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp('hub') / 'model'
    write_marian(folder)
    return folder


# --- the model

@pytest.mark.parametrize('fields', [
    sizes(), sizes() | UNTIED, sizes(share_encoder_decoder_embeddings=False), sizes(tie_word_embeddings=False),
    sizes(d_model=64, n_heads=1, n_layers=1), sizes(d_model=24, n_heads=8, n_layers=6, d_ff=96),
    sizes(activation_function='relu'), sizes(activation_function='gelu'), sizes(activation_function='silu'),
    sizes(scale_embedding=False), sizes(scale_embedding=False) | UNTIED], ids=lambda fields: ' '.join(
        f'{name}={value}' for name, value in fields.items() if sizes().get(name) != value and 'decoder' not in name))
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path, fields):
    theirs = write_marian(tmp_path / 'hub', std=0.1, **fields)
    model, _, rows = read(tmp_path / 'hub')
    assert model.config.tied == ('share_encoder_decoder_embeddings' not in fields
                                 and 'tie_word_embeddings' not in fields)
    src = random_sources(len(rows), 8)
    tgt = random_targets(len(rows), 8)
    wanted = theirs(input_ids=their_ids(src, rows), attention_mask=(src != PAD).long(),
                    decoder_input_ids=their_ids(tgt, rows)).logits
    found = model(src, tgt)
    assert (found[..., 1:] - wanted[..., torch.tensor(rows[1:])]).abs().max() < 2e-5
    assert (found.softmax(-1)[..., PAD] == 0).all() and wanted.std() > 0.3


@pytest.mark.parametrize('changes', [{}, {'scale_embedding': False, 'tied': False, 'activation': 'gelu'}], ids=str)
def test_the_engine_decodes_it_like_the_reference(changes):
    torch.manual_seed(0)
    model = MarianTransformer(MarianConfig(**vars(CONFIG) | changes)).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    src = random_sources(50, 6)
    assert [h.ids for h in inference.greedy(model, src, max_extra_tokens=9)] == decoding.greedy(model, src, 9)
    reference = [decoding.beam_search(model, row[row != PAD][None], max_extra_tokens=9)[0] for row in src]
    found = inference.beam_search(accelerate(model), src, max_extra_tokens=9)
    assert [h[0].ids for h in found] == [h.ids for h in reference]


def test_it_is_saved_and_loaded_by_its_kind(tmp_path):
    torch.manual_seed(0)
    model = MarianTransformer(MarianConfig(**vars(CONFIG) | {'scale_embedding': False})).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    save_model(model, tmp_path)
    assert json.loads((tmp_path / 'config.json').read_text())['kind'] == 'marian'
    again = load_model(tmp_path)
    assert again.config == model.config
    src = random_sources(50, 3)
    tgt = random_targets(50, 3)
    assert torch.equal(again(src, tgt), model(src, tgt))


def test_training_reaches_every_parameter_and_the_chunked_loss_knows_the_bias():
    torch.manual_seed(0)
    model = MarianTransformer(CONFIG).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    batch = collate([([4, 5, 6], [7, 8]), ([9, 10], [11, 12, 13])])
    gradients = []
    for loss_of in (training.batch_loss, lambda *args: kernels.summed_loss(*args) / batch.n_tokens):
        model.zero_grad()
        loss_of(model, batch, 0.1).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('field, value', [('norm', 'pre'), ('positions', 'learned'), ('d_k', 4), ('d_v', 4),
                                          ('activation', 'tanh'), ('n_heads', 3)])
def test_a_config_that_marian_does_not_have(field, value):
    with pytest.raises((ValueError, TypeCheckError), match=field):
        MarianConfig(**vars(CONFIG) | {field: value})


@torch.no_grad()
def test_a_model_of_the_paper_becomes_one_by_renaming_features():
    torch.manual_seed(0)
    config = TransformerConfig(50, n_layers=2, d_model=16, d_ff=24, n_heads=4, max_len=40, tied=False)
    ours = Transformer(config).eval()
    for parameter in ours.parameters():
        if parameter.dim() == 1:
            parameter.normal_(0.5)
    theirs = MarianTransformer(MarianConfig(**vars(config), activation='relu')).eval()
    src = random_sources(50, 4)
    tgt = random_targets(50, 4)
    order = marian.sines_first(16)
    tensors = {name: marian.reorder_features(name, p, order) for name, p in ours.named_parameters()}
    tensors['lm_head.bias'] = torch.zeros(50)
    theirs.load_state_dict(tensors)
    torch.testing.assert_close(theirs(src, tgt), ours(src, tgt), atol=1e-5, rtol=1e-5)
    for name in dict(ours.named_parameters()):         # each permutation is needed
        if not torch.equal(tensors[name], ours.get_parameter(name)):
            theirs.load_state_dict(tensors | {name: ours.get_parameter(name)})
            assert not torch.allclose(theirs(src, tgt), ours(src, tgt), atol=1e-4), name


# --- weights

def test_both_file_formats_give_the_same_model(hub, tmp_path):
    model, _, _ = read(hub)
    theirs = transformers.MarianMTModel.from_pretrained(hub)
    shutil.copytree(hub, tmp_path / 'copy')
    (tmp_path / 'copy' / 'model.safetensors').unlink()
    for convert in (torch.Tensor.float, torch.Tensor.half):
        tensors = {name: convert(p) for name, p in theirs.state_dict().items()} # each matrix under all its names
        torch.save(tensors, tmp_path / 'copy' / 'pytorch_model.bin')
        other, _, _ = read(tmp_path / 'copy')
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, atol=0 if convert is torch.Tensor.float else 1e-2, rtol=0)


def test_nothing_in_a_pickle_is_executed(hub, tmp_path):
    class Bad:
        def __reduce__(self):
            return (tmp_path / 'executed').touch, ()
    shutil.copytree(hub, tmp_path / 'copy')
    (tmp_path / 'copy' / 'model.safetensors').unlink()
    torch.save({'weights': Bad()}, tmp_path / 'copy' / 'pytorch_model.bin')
    with pytest.raises(ValueError, match='pytorch_model.bin is damaged, or holds more than tensors'):
        read(tmp_path / 'copy')
    assert not (tmp_path / 'executed').exists()


def test_forbidden_tokens_have_probability_zero(hub):
    model, _, rows = read(hub, forbidden=(5, 9))
    probabilities = model(random_sources(len(rows), 3), random_targets(len(rows), 3)).softmax(-1)
    for i, row in enumerate(rows):
        assert (probabilities[..., i] == 0).all() == (row in (5, 9, None)), row


# --- tokenizer

PLANES = [(32, 127), (0, 0x300), (0x300, 0x370), (0x400, 0x500), (0x900, 0xa00), (0x1e00, 0x2100), (0x2000, 0x2070),
          (0x3000, 0x3400), (0xac00, 0xd7a4), (0xf900, 0x10000), (0x1f300, 0x1f700), (0xe000, 0x110000)]


def noise(n, seed):
    "Sentences with characters from all of Unicode."
    rng = random.Random(seed)
    for _ in range(n):
        text = list(rng.choice(PAIRS)[0])
        for _ in range(rng.randrange(1, 20)):
            text[rng.randrange(len(text))] = chr(rng.randrange(*rng.choice(PLANES)))
        yield ''.join(text)


def test_the_tokenizer_gives_the_ids_and_texts_of_transformers(hub):
    _, tokenizer, rows = read(hub)
    theirs = transformers.AutoTokenizer.from_pretrained(hub)
    for side, lang in enumerate(('en', 'de')):
        texts = [pair[side] for pair in PAIRS[:200]] + list(noise(400, side))
        wanted = theirs(texts)['input_ids'] if side == 0 else theirs(text_target=texts)['input_ids']
        found = tokenizer.encode_batch(texts, lang)
        assert [[rows[i] for i in row] + [0] for row in found] == wanted
        texts = [theirs.decode(row, skip_special_tokens=True) for row in wanted]
        known = [[token for token in tokenizer.tokens(row) if token != SPECIALS[UNK]] for row in found]
        assert [tokenizer.join(tokens) for tokens in known] == texts
    assert tokenizer.encode('\ud800 </s>')                                        # a lone surrogate; text, not EOS
    assert not {PAD, BOS, EOS} & set(tokenizer.encode('</s> <pad> <eos>'))


def test_a_target_language_code_is_one_token(hub, tmp_path):
    shutil.copytree(hub, tmp_path / 'copy')
    vocabulary = json.loads((hub / 'vocab.json').read_text())
    word = max(vocabulary, key=lambda word: (word != '<pad>', vocabulary[word]))
    vocabulary['>>deu<<'] = vocabulary.pop(word)
    (tmp_path / 'copy' / 'vocab.json').write_text(json.dumps(vocabulary))
    _, tokenizer, rows = read(tmp_path / 'copy')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'copy')
    for text in ('>>deu<< This is a ball.', '>>xxx<< a ball', '>>deu a ball', 'a >>deu<< ball'):
        assert [rows[i] for i in tokenizer.encode(text)] + [0] == theirs(text)['input_ids']


@torch.no_grad()
def test_two_vocabularies_become_one(hub, tmp_path):
    folder = tmp_path / 'copy'
    shutil.copytree(hub, folder)
    vocab_sizes = [write_vocabulary(folder / name, pieces_of(data))
                   for name, data in zip(('vocab.json', 'target_vocab.json'), SENTENCEPIECE)]
    start = {'decoder_start_token_id': vocab_sizes[1] - 1, 'pad_token_id': vocab_sizes[1] - 1}
    theirs = random_marian(vocab_sizes[0], sizes() | UNTIED | start, target_vocab_size=vocab_sizes[1])
    theirs.save_pretrained(folder)
    (folder / 'tokenizer_config.json').write_text(
        json.dumps({'source_lang': 'en', 'target_lang': 'de', 'separate_vocabs': True}))
    model, tokenizer, rows = read(folder)
    src = tokenizer.encode(PAIRS[0][0], 'en')
    tgt = tokenizer.encode(PAIRS[0][1], 'de')
    vocabularies = [json.loads((folder / name).read_text()) for name in ('vocab.json', 'target_vocab.json')]
    their_src, their_tgt = [[vocabulary.get(piece, 1) for piece in tokenizer.tokens(ids)]
                            for vocabulary, ids in zip(vocabularies, (src, tgt))]
    wanted = theirs(input_ids=torch.tensor([their_src + [0]]),
                    decoder_input_ids=torch.tensor([[vocab_sizes[1] - 1] + their_tgt])).logits[0]
    found = model(torch.tensor([src + [EOS]]), torch.tensor([[BOS] + tgt]))[0]
    for i, row in enumerate(rows):
        if row is not None:
            assert (found[:, i] - wanted[:, row]).abs().max() < 1e-5
    assert (found.softmax(-1) > 0).sum(-1).max() == vocab_sizes[1]  # pieces of the source cannot be produced


# --- files that do not fit

def edit_config(**fields):
    def change(folder):
        config = json.loads((folder / 'config.json').read_text()) | fields
        (folder / 'config.json').write_text(json.dumps(config))
    return change


def edit_weights(name, tensor):
    def change(folder):
        weights = safetensors.torch.load_file(folder / 'model.safetensors')
        safetensors.torch.save_file(weights | {name: tensor}, folder / 'model.safetensors')
    return change


def remove(name):
    return lambda folder: (folder / name).unlink()


def truncate(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


FAULTS = [
    (remove('config.json'), 'it has no config.json'),
    (remove('source.spm'), 'it has no source.spm'),
    (remove('vocab.json'), 'it has no vocab.json'),
    (remove('model.safetensors'), 'neither model.safetensors nor pytorch_model.bin'),
    (truncate('config.json', 9), 'config.json is damaged'),
    (truncate('vocab.json', 9), 'vocab.json is damaged'),
    (truncate('model.safetensors', -9), 'model.safetensors is damaged'),
    (truncate('target.spm', -9), 'the .spm files cannot be used'),
    (truncate('target.spm', 0), 'not a SentencePiece model'),
    (lambda folder: (folder / 'vocab.json').write_text('{"a": "b"}'), 'vocab.json does not fit config.json'),
    (lambda folder: (folder / 'vocab.json').write_text('{"a": 1, "b": 1}'), 'two pieces share an id'),
    (lambda folder: (folder / 'vocab.json').write_text('{"a": 1}'), 'the vocabulary has no <unk>'),
    (edit_config(model_type='bart'), "config.json: model_type='bart' is not supported"),
    (edit_config(normalize_before=True), 'normalize_before=True is not supported, only False'),
    (edit_config(decoder_layers=1), 'decoder_layers=1 is not supported, only 2'),
    (edit_config(decoder_attention_heads=2), 'decoder_attention_heads=2'),
    (edit_config(activation_function='tanh'), "activation_function='tanh' is unknown"),
    (edit_config(eos_token_id=10_000), 'the id 10000 of a special token'),
    (edit_config(decoder_start_token_id=0), 'the id 0 of a special token is used twice'),
    (edit_config(dropout=1.5), 'config.json: dropout=1.5'),
    (edit_weights('model.encoder.layers.0.fc1.weight', torch.zeros(24, 15)),
     r'model.encoder.layers.0.fc1.weight has shape \(24, 15\), expected \(24, 16\)'),
    (edit_weights('model.shared.weight', torch.zeros(7, 16)), r'model.shared.weight has shape \(7, 16\)'),
    (edit_weights('final_logits_bias', torch.zeros(1, 3)), r'final_logits_bias has shape \(1, 3\)'),
    (edit_weights('model.encoder.layernorm_embedding.weight', torch.zeros(16)), 'has no counterpart'),
    (edit_weights('model.encoder.embed_positions.weight', torch.zeros(64, 16)), 'does not hold sinusoidal positions'),
]


@pytest.mark.parametrize('change, message', FAULTS, ids=[message for _, message in FAULTS])
def test_a_fault_is_named_in_one_line(hub, tmp_path, change, message):
    shutil.copytree(hub, tmp_path / 'copy')
    change(tmp_path / 'copy')
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        read(tmp_path / 'copy')
    assert 'copy' in str(caught.value) and '\n' not in str(caught.value)
