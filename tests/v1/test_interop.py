"""Other implementations: Marian in and out beside transformers, CTranslate2 beside us on a trained model,
torch's module, bad folders."""
import io
import json
import random
import shutil
import sys
from dataclasses import replace
from itertools import count, islice

import ctranslate2
import pytest
import safetensors.torch
import sentencepiece
import torch
import transformers
from torch import nn

from annotated_transformer.v1 import interop
from annotated_transformer.v1.batches import BatchLoader, encode_pairs
from annotated_transformer.v1.cli import main
from annotated_transformer.v1.decoding import DecodingConfig, beam_search
from annotated_transformer.v1.interop import (CTranslate2Model, export_ctranslate2, export_marian,
                                              from_torch_transformer, import_marian, to_torch_transformer)
from annotated_transformer.v1.scoring import score
from annotated_transformer.v1.toy_languages import toy_ende
from annotated_transformer.v1.training import batch_loss
from annotated_transformer.v1.transformer import Transformer, TransformerConfig
from annotated_transformer.v1.translator import ModelFolder, Translator
from annotated_transformer.v1.vocabulary import (BOS, EOS, PAD, SPECIALS, UNK, BytePairTokenizer,
                                              WordTokenizer, load_tokenizer)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings('ignore:Recommended. pip install sacremoses', 'ignore:enable_nested_tensor')

PAIRS = [(p.src, p.tgt) for p in toy_ende('train', n=1500)]
SIZES = {'small': dict(d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
                       encoder_attention_heads=4, decoder_attention_heads=4),
         'wide': dict(d_model=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
                      encoder_attention_heads=1, decoder_attention_heads=1),
         'deep': dict(d_model=24, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=96, decoder_ffn_dim=96,
                      encoder_attention_heads=8, decoder_attention_heads=8)}
TIES = {'tied': {}, 'untied': dict(share_encoder_decoder_embeddings=False, tie_word_embeddings=False),
        'source apart': dict(share_encoder_decoder_embeddings=False), 'output apart': dict(tie_word_embeddings=False)}


def spm(texts, size=150, **options):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=out, vocab_size=size, hard_vocab_limit=False,
        minloglevel=2, num_threads=1, **options)
    return out.getvalue()


SPM = [spm([pair[side] for pair in PAIRS]) for side in (0, 1)]


def pieces(*models):
    known = [sentencepiece.SentencePieceProcessor(model_proto=data) for data in models]
    return [p for p in dict.fromkeys(m.id_to_piece(i) for m in known for i in range(len(m)))
            if p not in ('<unk>', '<s>', '</s>')]


def write_vocabulary(path, words):
    vocabulary = {word: i for i, word in enumerate(['</s>', '<unk>', *words, '<pad>'])}
    path.write_text(json.dumps(vocabulary))
    return len(vocabulary)


@torch.no_grad()
def marian(v, c, seed=0, std=0.2, tgt_v=None):
    "A Marian model with random weights."
    torch.manual_seed(seed)
    special = dict(pad_token_id=v - 1, eos_token_id=0, decoder_start_token_id=v - 1, forced_eos_token_id=0)
    config = dict(vocab_size=v, decoder_vocab_size=tgt_v or v, max_position_embeddings=64,
                  activation_function='swish', scale_embedding=True,
                  init_std=std, bos_token_id=None) | special | c
    model = transformers.MarianMTModel(transformers.MarianConfig(**config)).eval()
    for p in model.parameters():
        if p.dim() == 1: p.add_(std * torch.randn_like(p))
    model.final_logits_bias.normal_()
    model.generation_config = transformers.GenerationConfig(
        **special, bad_words_ids=[[v - 1]], renormalize_logits=True,
        num_beams=4, length_penalty=1.0, early_stopping='never', max_length=60)
    return model


@torch.no_grad()
def come_to_an_end(model, late=6):
    "Make EOS likelier with every position, so that translations by random weights have an end."
    src, tgt = torch.randint(2, model.config.vocab_size - 1, (2, 40, 24))
    tgt[:, 0] = model.config.decoder_start_token_id
    for table in {id(t.weight): t.weight
                  for t in (model.get_input_embeddings(), model.model.decoder.embed_tokens)}.values():
        table.mul_(0.5)
    model.final_logits_bias.mul_(0.3)
    states = model.model(input_ids=src, decoder_input_ids=tgt).last_hidden_state.mean(0)
    way = states[late:late+8].mean(0) - states[:3].mean(0)
    model.lm_head.weight[0] = 16 * way / way.square().sum()
    model.final_logits_bias[0, 0] = model.final_logits_bias.max() - states[late] @ model.lm_head.weight[0]


def write_marian(folder, c=SIZES['small'], models=SPM, ends=False, std=0.15):
    folder.mkdir()
    size = write_vocabulary(folder/'vocab.json', pieces(*models))
    model = marian(size, c, std=std)
    if ends: come_to_an_end(model)
    model.save_pretrained(folder)
    for side, data in zip(('source', 'target'), models): (folder/f'{side}.spm').write_bytes(data)
    (folder/'tokenizer_config.json').write_text(json.dumps(dict(source_lang='en', target_lang='de')))
    return model


def rows_of(folder):
    "Which row of Marian's each of our ids has, and the ids the other way round."
    _, rows = interop.marian_tokenizer(folder, interop.marian_config(folder))
    return rows[1]


def random_ids(v, n, seed=0):
    rng = random.Random(seed)
    return padded([[rng.randrange(4, v) for _ in range(rng.randrange(1, 16))] + [EOS] for _ in range(n)])


def padded(rows):
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def theirs(ids, rows): return torch.tensor([rows[BOS], *rows[1:]])[ids]          # our PAD is their PAD, which fills up


# --- Marian in: numbers

@torch.no_grad()
def logits_agree(there, model, rows):
    src, tgt = random_ids(len(rows), 8), random_ids(len(rows), 8, seed=1).roll(1, 1)
    tgt[:, 0] = BOS
    wanted = there(input_ids=theirs(src, rows), attention_mask=(src != PAD).long(),
                   decoder_input_ids=theirs(tgt, rows)).logits
    own = model(src, tgt)
    # their ids, in terms of ours
    assert (own[..., torch.tensor(rows[1:]).argsort() + 1] - wanted).abs().max() < 1e-5
    assert (own.softmax(-1)[..., PAD] == 0).all() and wanted.std() > 0.5


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('tie', TIES)
def test_an_imported_model_gives_transformers_logits(tmp_path, size, tie):
    there = write_marian(tmp_path/'hub', SIZES[size] | TIES[tie], std=0.1)
    ours = ModelFolder.load(import_marian(tmp_path/'hub', tmp_path/'ours'), 'cpu')
    assert ours.model.config.tied == (tie == 'tied')
    logits_agree(there, ours.model, rows_of(tmp_path/'hub'))


@pytest.mark.parametrize('c', [
    dict(activation_function='relu'), dict(activation_function='gelu'), dict(activation_function='silu'),
    dict(scale_embedding=False), dict(scale_embedding=False) | TIES['untied']], ids=str)
def test_other_settings_give_them_too(tmp_path, c):
    there = write_marian(tmp_path/'hub', SIZES['small'] | c)
    logits_agree(there, ModelFolder.load(import_marian(tmp_path/'hub', tmp_path/'ours'), 'cpu').model,
                 rows_of(tmp_path/'hub'))


@pytest.mark.parametrize('size, tie, std', [('small', 'tied', 0.12), ('small', 'untied', 0.15), ('deep', 'tied', 0.12)])
def test_beam_four_says_what_transformers_says(tmp_path, size, tie, std):
    there = write_marian(tmp_path/'hub', SIZES[size] | TIES[tie], ends=True, std=std)
    ours = ModelFolder.load(import_marian(tmp_path/'hub', tmp_path/'ours'), 'cpu')
    rows = rows_of(tmp_path/'hub')
    src, found = random_ids(len(rows), 200, seed=2), []
    for part in src.split(100):
        with torch.no_grad(): ids = there.generate(theirs(part, rows), attention_mask=(part != PAD).long())
        found += [[i for i in row if i not in (rows[BOS], rows[EOS])] for row in ids.tolist()]
    own = [[rows[i] for i in h[0].ids]
           for h in beam_search(ours.model, src, DecodingConfig(4, alpha=1.0, length_offset=0.0))]
    lengths = sorted(map(len, own))
    assert own == found
    assert len({tuple(row) for row in own}) > 3 and lengths[-1] < 50             # neither all alike, nor cut off


def test_the_two_formats_of_weights_are_one_model(tmp_path):
    there = write_marian(tmp_path/'hub')
    import_marian(tmp_path/'hub', tmp_path/'safe')
    (tmp_path/'hub'/'model.safetensors').unlink()
    torch.save(there.state_dict(), tmp_path/'hub'/'pytorch_model.bin')      # every table by every name, positions too
    import_marian(tmp_path/'hub', tmp_path/'pickled')
    assert (tmp_path/'safe'/'model.safetensors').read_bytes() == (tmp_path/'pickled'/'model.safetensors').read_bytes()
    torch.save({name: p.half() for name, p in there.state_dict().items()}, tmp_path/'hub'/'pytorch_model.bin')
    half = ModelFolder.load(import_marian(tmp_path/'hub', tmp_path/'half'), 'cpu').model
    assert half.output.weight.dtype == torch.float32


# --- Marian in: text

def judge(folder): return transformers.AutoTokenizer.from_pretrained(folder)


def test_text_to_text_as_transformers_does_it(tmp_path):
    there = write_marian(tmp_path/'hub', ends=True)
    main(['import-marian', str(tmp_path/'hub'), '--out', str(tmp_path/'ours')])
    translator = Translator.load(tmp_path/'ours', 'cpu')
    assert translator.decoding == DecodingConfig(4, alpha=1.0, length_offset=0.0)
    tokenizer, texts = judge(tmp_path/'hub'), [text for text, _ in PAIRS[:60]]
    with torch.no_grad(): ids = there.generate(**tokenizer(texts, return_tensors='pt', padding=True))
    there_said = tokenizer.batch_decode(ids, skip_special_tokens=True)
    ours = [text.replace('⁇', '') for text in translator.translate(texts)]    # transformers drops what is unknown
    assert [' '.join(text.split()) for text in ours] == [' '.join(text.split()) for text in there_said]
    assert len(set(ours)) > 3


PLANES = [(32, 127), (0, 0x300), (0x300, 0x370), (0x400, 0x500), (0x900, 0xa00), (0x1e00, 0x2100),
          (0x2000, 0x2070), (0x3000, 0x3400), (0xac00, 0xd7a4), (0xf900, 0x10000),
          (0x1f300, 0x1f700), (0xe000, 0x110000)]


def noise(n, seed=0):
    rng = random.Random(seed)
    def char(text, share): return chr(rng.randrange(*rng.choice(PLANES))) if rng.random() < share else rng.choice(text)
    for _ in range(n):
        text, share = rng.choice(rng.choice(PAIRS)), rng.choice((0.05, 0.5))
        yield ''.join(char(text, share) for _ in range(rng.randrange(1, 60)))


def test_the_tokenizer_gives_transformers_ids_and_texts(tmp_path):
    write_marian(tmp_path/'hub')
    import_marian(tmp_path/'hub', tmp_path/'ours')
    tokenizer, other, rows = (load_tokenizer(tmp_path/'ours'/'tokenizer.json'),
                              judge(tmp_path/'hub'), rows_of(tmp_path/'hub'))
    for side, lang in enumerate(('en', 'de')):
        texts = ([pair[side] for pair in PAIRS[:500]]
                 + [t for t in noise(1500, side) if '</s>' not in t and '<unk>' not in t and '<pad>' not in t])
        wanted = other(texts)['input_ids'] if side == 0 else other(text_target=texts)['input_ids']
        own = tokenizer.encode_batch(texts, lang)
        assert [[rows[i] for i in row] + [0] for row in own] == wanted
        texts = [other.decode(row, skip_special_tokens=True) for row in wanted]
        assert [tokenizer.join([t for t in tokenizer.tokens(row) if t != SPECIALS[UNK]]) for row in own] == texts
    assert tokenizer.encode('\ud800 </s>')    # a lone surrogate, and a mark that is text here
    assert not {PAD, BOS, EOS} & set(tokenizer.encode('</s> <pad> <eos>'))


def test_a_language_to_translate_into_is_one_token(tmp_path):
    folder = tmp_path/'hub'
    write_marian(folder)
    vocabulary = json.loads((folder/'vocab.json').read_text())
    last = max(i for word, i in vocabulary.items() if word != '<pad>')
    word = next(word for word, i in vocabulary.items() if i == last)
    vocabulary['>>deu<<'] = vocabulary.pop(word)
    (folder/'vocab.json').write_text(json.dumps(vocabulary))
    tokenizer = ModelFolder.load(import_marian(folder, tmp_path/'ours'), 'cpu').tokenizer
    rows = rows_of(folder)
    for text in ('>>deu<< This is a ball.', '>>xxx<< a ball', '>>deu a ball', 'a >>deu<< ball'):
        assert [rows[i] for i in tokenizer.encode(text)] + [0] == judge(folder)(text)['input_ids']


def test_two_vocabularies_become_one(tmp_path):
    folder = tmp_path/'hub'
    write_marian(folder)
    sizes = [write_vocabulary(folder/name, pieces(data))
             for name, data in zip(('vocab.json', 'target_vocab.json'), SPM)]
    c = SIZES['small'] | dict(share_encoder_decoder_embeddings=False, tie_word_embeddings=False)
    start = dict(decoder_start_token_id=sizes[1] - 1, pad_token_id=sizes[1] - 1)
    there = marian(sizes[0], c | start, tgt_v=sizes[1])
    there.save_pretrained(folder)
    (folder/'tokenizer_config.json').write_text(
        json.dumps(dict(source_lang='en', target_lang='de', separate_vocabs=True)))
    ours = ModelFolder.load(import_marian(folder, tmp_path/'ours'), 'cpu')
    text, translation = PAIRS[0]
    src, tgt = ours.tokenizer.encode(text, 'en'), ours.tokenizer.encode(translation, 'de')
    own = [json.loads((folder/name).read_text()) for name in ('vocab.json', 'target_vocab.json')]
    there_src, there_tgt = ([vocabulary.get(piece, 1) for piece in ours.tokenizer.tokens(ids)]
                            for vocabulary, ids in zip(own, (src, tgt)))
    with torch.no_grad():
        logits = there(input_ids=torch.tensor([there_src + [0]]),
                       decoder_input_ids=torch.tensor([[sizes[1] - 1] + there_tgt])).logits[0]
        mine = ours.model(torch.tensor([src + [EOS]]), torch.tensor([[BOS] + tgt]))[0]
    for token, i in own[1].items():
        at = {'<pad>': BOS, '</s>': EOS, '<unk>': UNK}.get(token) or ours.tokenizer.itos.index(token)
        assert (mine[:, at] - logits[:, i]).abs().max() < 1e-5
    assert (mine.softmax(-1) > 0).sum(-1).max() == sizes[1]                        # and nothing else can be said


# --- Marian out

BPE = BytePairTokenizer.train(
    [(lang, [pair[side] for pair in PAIRS]) for side, lang in enumerate(('en', 'de'))], vocab_size=250)
CONFIG = TransformerConfig(len(BPE), n_layers=2, d_model=32, d_ff=48, n_heads=4, dropout=0.1, max_len=64)


@torch.no_grad()
def stirred(config, seed=0):
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    for p in model.parameters():
        if p.dim() == 1: p.add_(0.3 * torch.randn_like(p))
    return model


def same(model, other):
    return model.config == other.config and all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


SEARCH = dict(beam_size=6, min_len=4, no_repeat_ngram=2)

@pytest.mark.parametrize('change', [dict(), dict(tied=False), dict(activation='swish', output_bias=True),
                                    dict(n_layers=3, n_heads=1, d_model=64)], ids=str)
def test_an_exported_model_is_transformers_and_comes_back(tmp_path, change):
    ModelFolder(stirred(replace(CONFIG, **change)), BPE, dict(decoding=SEARCH)).save(tmp_path/'ours')
    own = ModelFolder.load(tmp_path/'ours', 'cpu')
    with pytest.warns(UserWarning, match='no length_offset=5: .* alpha=0.6 alone'):
        export_marian(tmp_path/'ours', tmp_path/'marian')
    there, info = transformers.MarianMTModel.from_pretrained(tmp_path/'marian', output_loading_info=True)
    assert not any(info[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), info
    src, tgt = random_ids(len(BPE), 8), random_ids(len(BPE), 8, seed=1).roll(1, 1)
    tgt[:, 0] = BOS
    with torch.no_grad():
        logits = there.eval()(input_ids=src, attention_mask=(src != PAD).long(), decoder_input_ids=tgt).logits
        assert (logits - own.model(src, tgt)).abs().max() < 1e-5
    back = ModelFolder.load(import_marian(tmp_path/'marian', tmp_path/'back'), 'cpu')
    assert same(back.model, own.model) and back.tokenizer.state() == BPE.state()
    assert back.decoding == DecodingConfig(**SEARCH, length_offset=0.0)
    found = there.generate(src, attention_mask=(src != PAD).long(), max_new_tokens=9)
    for row in found.tolist():
        ids = [i for i in row[1:] if i not in (PAD, EOS)]
        assert len(ids) >= 4 and len({*zip(ids, ids[1:])}) == len(ids) - 1 # not too short, and no two tokens twice
    texts = [text for text, _ in PAIRS[:100]] + ['<eos> </s>', '']
    assert judge(tmp_path/'marian')(texts)['input_ids'] == [row + [EOS] for row in BPE.encode_batch(texts)]


def test_what_came_in_goes_out(tmp_path):
    write_marian(tmp_path/'hub', ends=True)
    first = ModelFolder.load(import_marian(tmp_path/'hub', tmp_path/'ours'), 'cpu')
    there = transformers.MarianMTModel.from_pretrained(export_marian(tmp_path/'ours', tmp_path/'out')).eval()
    again = ModelFolder.load(import_marian(tmp_path/'out', tmp_path/'again'), 'cpu')
    assert same(first.model, again.model) and first.tokenizer.state() == again.tokenizer.state()
    texts = [text for text, _ in PAIRS[:30]]
    ids = judge(tmp_path/'out')(texts, return_tensors='pt', padding=True)
    with torch.no_grad(): said = there.generate(**ids, max_length=60)
    ours = beam_search(first.model, padded(first.encode(texts)), DecodingConfig(4, alpha=1.0, length_offset=0.0))
    assert [[i for i in row if i > EOS] for row in said.tolist()] == [h[0].ids for h in ours]
    (tmp_path/'out'/interop.OWN_TOKENIZER).unlink()                             # the .spm files serve as well
    assert same(ModelFolder.load(import_marian(tmp_path/'out', tmp_path/'third'), 'cpu').model, first.model)


def test_words_go_out_as_ids(tmp_path):
    words = WordTokenizer.train([('en', [text for text, _ in PAIRS])], 60)
    words.langs = 'en', 'de'
    ModelFolder(stirred(replace(CONFIG, vocab_size=len(words))), words).save(tmp_path/'ours')
    out = export_marian(tmp_path/'ours', tmp_path/'marian')
    assert not (out/'tokenizer_config.json').exists()
    assert ModelFolder.load(import_marian(out, tmp_path/'back'), 'cpu').tokenizer.state() == words.state()


# --- CTranslate2

@pytest.fixture(scope='module', params=['sinusoidal', 'rotary'])
def trained(request, tmp_path_factory):
    "A small model that has learned some toy EN-DE, in its folder."
    torch.manual_seed(0)
    pairs = [(p.src, p.tgt) for p in toy_ende('train', n=3000)]
    words = WordTokenizer.train(
        [(lang, [pair[side] for pair in pairs]) for side, lang in enumerate(('en', 'de'))], 2000)
    model = Transformer(TransformerConfig(
        len(words), n_layers=2, d_model=64, d_ff=128, n_heads=4, dropout=0.0, max_len=64,
        norm='pre', activation='swish', output_bias=True, positions=request.param))
    loader = BatchLoader(encode_pairs(pairs, words, ('en', 'de'), 64), max_tokens=700, seed=1)
    adam, steps = torch.optim.Adam(model.parameters(), 5e-3, (0.9, 0.98)), 400
    rate = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1, (step + 1)/60) * (1 - step/steps))
    for batch in islice((batch for epoch in count() for batch in loader.epoch(epoch)), steps):
        loss = batch_loss(model, batch, 0.1) / batch.n_tokens
        adam.zero_grad(), loss.backward(), adam.step(), rate.step()
    folder = tmp_path_factory.mktemp('trained')/'model'
    ModelFolder(model, words).save(folder)
    return folder


def test_ctranslate2_translates_as_we_do(trained, tmp_path):
    test = toy_ende('test', n=500)
    texts, references = [p.src for p in test], [p.tgt for p in test]
    # both stop when four have ended
    ours = Translator.load(trained, 'cpu').translate(texts, alpha=1.0, length_offset=0.0, patience=1.0)
    bleu = score(ours, references).bleu
    assert bleu > 30, bleu                                                        # it has learned something
    for quantization in ('float32', 'int8', 'int8_float32'):
        served = CTranslate2Model(export_ctranslate2(trained, tmp_path/quantization, quantization), intra_threads=1)
        found = served.translate(texts, length_penalty=1.0)
        if quantization == 'float32': assert sum(a == b for a, b in zip(ours, found)) >= 0.99 * len(texts)
        else: assert abs(score(found, references).bleu - bleu) < 0.5
    size = {kind: (tmp_path/kind/'model.bin').stat().st_size for kind in ('float32', 'int8')}
    assert size['int8'] < size['float32']


@pytest.mark.parametrize('change', [
    dict(), dict(norm='pre', activation='gelu'), dict(positions='learned', tied=False),
    dict(activation='swish', output_bias=True, n_heads=1),
    dict(norm='pre', positions='learned', n_layers=3),
    dict(positions='rotary'), dict(norm='pre', positions='rotary', n_heads=1, max_len=2000)], ids=str)
def test_ctranslate2_gives_our_log_probabilities(tmp_path, change):
    own = ModelFolder(stirred(replace(CONFIG, **change)), BPE)
    own.save(tmp_path/'ours')
    out = export_ctranslate2(tmp_path/'ours', tmp_path/'served')
    rng = random.Random(0)
    rows, said = ([[rng.randrange(3, len(BPE)) for _ in range(rng.randrange(1, 20))] for _ in range(30)]
                  for _ in range(2))
    scores = ctranslate2.Translator(str(out), device='cpu', intra_threads=1).score_batch(
        [BPE.tokens(row) for row in rows], [BPE.tokens(row) for row in said])
    for row, target, found in zip(rows, said, scores, strict=True):
        with torch.no_grad(): logits = own.model(torch.tensor([row + [EOS]]), torch.tensor([[BOS] + target]))[0]
        logits[:, [PAD, BOS]] = -torch.inf
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(target + [EOS])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.log_probs), wanted, atol=1e-4, rtol=1e-4)


def test_ctranslate2_never_says_pad_or_bos(tmp_path):
    model = stirred(replace(CONFIG, output_bias=True))
    with torch.no_grad(): model.output.bias[[PAD, BOS]] = 20.                        # it would like nothing better
    ModelFolder(model, BPE).save(tmp_path/'ours')
    served = CTranslate2Model(export_ctranslate2(tmp_path/'ours', tmp_path/'served'), intra_threads=1)
    found = served.translator.translate_batch(
        [BPE.tokens(row) for row in BPE.encode_batch([text for text, _ in PAIRS[:20]])],
        max_decoding_length=30)
    assert not {SPECIALS[PAD], SPECIALS[BOS]} & {token for one in found for token in one.hypotheses[0]}


def test_a_served_folder_takes_any_list(trained, tmp_path):
    served = CTranslate2Model(export_ctranslate2(trained, tmp_path/'served'), intra_threads=1)
    texts = ['', PAIRS[0][0], '\ud800 \0 \U0001f642', ' ', 'the dog ' * 200, '<eos> <pad>']
    found = served.translate(texts)
    assert len(found) == len(texts) and found[0] == found[3] == '' and found[1] == served.translate(PAIRS[0][0])


# --- what cannot be

FAULTS = {
    'no config.json': (lambda f: (f/'config.json').unlink(), FileNotFoundError, 'it has no config.json'),
    'no source.spm': (lambda f: (f/'source.spm').unlink(), FileNotFoundError, 'it has no source.spm'),
    'no vocab.json': (lambda f: (f/'vocab.json').unlink(), FileNotFoundError, 'it has no vocab.json'),
    'no weights': (lambda f: (f/'model.safetensors').unlink(),
                   FileNotFoundError, 'neither model.safetensors nor pytorch_model.bin'),
    'config.json cut': (lambda f: (f/'config.json').write_text('{"model_type"'), ValueError, 'config.json is damaged'),
    'config.json a list': (lambda f: (f/'config.json').write_text('[]'), ValueError, 'config.json is damaged'),
    'vocab.json cut': (lambda f: (f/'vocab.json').write_text('{'), ValueError, 'vocab.json is damaged'),
    'vocab.json with words': (lambda f: (f/'vocab.json').write_text('{"a": "b"}'),
                              ValueError, 'vocab.json does not fit'),
    'weights cut': (lambda f: (f/'model.safetensors').write_bytes((f/'model.safetensors').read_bytes()[:-9]),
                    ValueError, 'model.safetensors is damaged'),
    'spm cut': (lambda f: (f/'target.spm').write_bytes((f/'target.spm').read_bytes()[:-9]),
                ValueError, 'the .spm files cannot be used'),
    'spm of nothing': (lambda f: (f/'target.spm').write_bytes(b''), ValueError, 'no model of sentencepiece'),
    'spm of noise': (lambda f: (f/'target.spm').write_bytes(b'pieces'), ValueError, 'no model of sentencepiece'),
}
for name, value in dict(
        model_type='bart', static_position_embeddings=False, normalize_before=True,
        decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=7, activation_function='tanh',
        eos_token_id=10_000, decoder_start_token_id=0, encoder_layers=0, dropout=1.5).items():
    def change(f, name=name, value=value):
        c = json.loads((f/'config.json').read_text()) | {name: value}
        if name == 'encoder_layers': c['decoder_layers'] = value
        (f/'config.json').write_text(json.dumps(c))
    FAULTS[f'{name} {value}'] = (change, ValueError, 'config.json: ' + (
        name if name in ('model_type', 'activation_function', 'dropout') else ''))
for name, tensor in {
        'model.encoder.layers.0.fc1.weight': torch.zeros(24, 15), 'model.shared.weight': torch.zeros(7, 16),
        'model.encoder.layernorm_embedding.weight': torch.zeros(16),
        'final_logits_bias': torch.zeros(1, 3)}.items():
    def change(f, name=name, tensor=tensor):
        safetensors.torch.save_file(
            safetensors.torch.load_file(f/'model.safetensors') | {name: tensor}, f/'model.safetensors')
    FAULTS[f'{name} {tuple(tensor.shape)}'] = change, ValueError, 'model.safetensors: '


@pytest.fixture(scope='module')
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp('hub')/'model'
    write_marian(folder)
    return folder


@pytest.mark.parametrize('fault', FAULTS)
def test_a_folder_with_a_fault_is_refused_in_one_line(hub, tmp_path, fault):
    change, kind, words = FAULTS[fault]
    shutil.copytree(hub, tmp_path/'copy')
    change(tmp_path/'copy')
    with pytest.raises(kind) as caught: import_marian(tmp_path/'copy', tmp_path/'out')
    assert words in str(caught.value) and 'copy' in str(caught.value) and '\n' not in str(caught.value)
    assert not (tmp_path/'out').exists() and not list(tmp_path.glob('*.partial'))


def test_nothing_in_a_pickle_is_run(hub, tmp_path):
    shutil.copytree(hub, tmp_path/'copy')
    (tmp_path/'copy'/'model.safetensors').unlink()
    class Bad:
        def __reduce__(self): return (tmp_path/'ran').touch, ()
    torch.save({'weights': Bad()}, tmp_path/'copy'/'pytorch_model.bin')
    with pytest.raises(ValueError, match='pytorch_model.bin is damaged, or holds more than numbers'):
        import_marian(tmp_path/'copy', tmp_path/'out')
    assert not (tmp_path/'ran').exists()


@pytest.mark.parametrize('change, words', [
    (dict(norm='pre'), "norm='pre': Marian has only 'post'"),
    (dict(positions='learned'), "positions='learned': Marian"),
    (dict(d_v=5), 'd_v=5: Marian divides'), (dict(positions='rotary'), "positions='rotary': Marian")], ids=str)
def test_what_marian_has_not_stays(tmp_path, change, words):
    ModelFolder(Transformer(replace(CONFIG, **change)), BPE).save(tmp_path/'ours')
    with pytest.raises(ValueError, match=words): export_marian(tmp_path/'ours', tmp_path/'out')
    assert not (tmp_path/'out').exists()


@pytest.mark.parametrize('change, words', [
    (dict(positions='alibi'), "positions='alibi': CTranslate2 has only"),
    (dict(d_k=4), 'd_k=4: CTranslate2')], ids=str)
def test_what_ctranslate2_has_not_stays(tmp_path, change, words):
    ModelFolder(Transformer(replace(CONFIG, **change)), BPE).save(tmp_path/'ours')
    with pytest.raises(ValueError, match=words): export_ctranslate2(tmp_path/'ours', tmp_path/'out')
    assert not (tmp_path/'out').exists() and not list(tmp_path.glob('*.partial'))


@pytest.mark.parametrize('name', ['model.bin', 'config.json', 'shared_vocabulary.json', 'tokenizer.json'])
@pytest.mark.parametrize('fault', ['missing', 'cut'])
def test_a_ctranslate2_folder_with_a_fault_is_refused_in_one_line(tmp_path, name, fault):
    ModelFolder(Transformer(CONFIG), BPE).save(tmp_path/'ours')
    out = export_ctranslate2(tmp_path/'ours', tmp_path/'served')
    if fault == 'missing': (out/name).unlink()
    else: (out/name).write_bytes((out/name).read_bytes()[:200])
    with pytest.raises(FileNotFoundError if fault == 'missing' else ValueError) as caught: CTranslate2Model(out)
    assert (('served' in str(caught.value)) and '\n' not in str(caught.value)
            and (name in str(caught.value) or name == 'model.bin' or fault == 'cut'))


def test_without_the_libraries(hub, tmp_path, monkeypatch):
    for name in ('transformers', 'ctranslate2'): monkeypatch.setitem(sys.modules, name, None)
    import_marian(hub, tmp_path/'ours')                                             # Marian's doors need neither
    assert Translator.load(tmp_path/'ours', 'cpu').translate('This is a ball.')
    export_marian(tmp_path/'ours', tmp_path/'out')
    with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[ctranslate2\]'"):
        export_ctranslate2(tmp_path/'ours', tmp_path/'served')
    with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[ctranslate2\]'"):
        CTranslate2Model(tmp_path/'ours')
    monkeypatch.setitem(sys.modules, 'sentencepiece', None)
    with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[marian\]'"):
        import_marian(hub, tmp_path/'again')
    with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[marian\]'"):
        Translator.load(tmp_path/'ours', 'cpu')
    assert not (tmp_path/'again').exists()


def test_nothing_is_overwritten(hub, tmp_path):
    import_marian(hub, tmp_path/'ours')
    for door in (import_marian, export_marian, export_ctranslate2):
        with pytest.raises(FileExistsError, match='choose another folder'): door(tmp_path/'ours', tmp_path/'ours')


# --- torch.nn.Transformer

@pytest.mark.parametrize('norm', ['post', 'pre'])
@pytest.mark.parametrize('activation', ['relu', 'swish', 'gelu'])
def test_torchs_module_there_and_back(norm, activation):
    own = stirred(replace(CONFIG, norm=norm, activation=activation, positions='learned'))
    module = to_torch_transformer(own)
    src, tgt = random_ids(len(BPE), 4), random_ids(len(BPE), 4, seed=1)
    hidden = src == PAD
    past = torch.ones(tgt.size(1), tgt.size(1)).triu(1).bool()
    with torch.no_grad():
        found = module(own.embed_src(src), own.embed_tgt(tgt), tgt_mask=past,
                       src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
        torch.testing.assert_close(found, own.states(src, tgt), atol=1e-5, rtol=1e-5)
    back = from_torch_transformer(module, len(BPE), positions='learned', max_len=64)
    assert back.config == own.config
    for name, p in back.named_parameters():
        if 'coder.' in name: assert torch.equal(p, own.get_parameter(name)), name
    module.train()
    assert from_torch_transformer(module, 10).training


def test_torchs_own_postnorm_module_has_one_norm_too_many():
    with pytest.raises(ValueError, match='post-norm Transformer with one more norm'):
        from_torch_transformer(nn.Transformer(16, 4, 1, 1, 8), 10)
    theirs = nn.Transformer(16, 4, 2, 2, 8, norm_first=True)
    own = from_torch_transformer(theirs.eval(), 10)
    src, tgt = torch.randn(7, 3, 16), torch.randn(5, 3, 16)    # torch's usual order: positions first
    with torch.no_grad():
        memory = own.encoder(src.transpose(0, 1))
        torch.testing.assert_close(theirs(src, tgt), own.decoder(tgt.transpose(0, 1), memory).transpose(0, 1),
                                   atol=1e-5, rtol=1e-5)
