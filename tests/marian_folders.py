"Small Marian models with random weights, in the format of transformers: what the tests of `marian` and `interop` read."
import io
import json
import random

import sentencepiece
import torch
import transformers

from annotated_transformer.batches import pad_rows
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.vocabulary import BOS, EOS

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

PAIRS = [(pair.src, pair.tgt) for pair in toy_ende('train', n=1200)]
UNTIED = {'share_encoder_decoder_embeddings': False, 'tie_word_embeddings': False}


def sizes(n_layers=2, d_ff=24, n_heads=4, **others):
    "Fields of transformers' MarianConfig: equal sizes for encoder and decoder."
    fields = {}
    for stack in ('encoder', 'decoder'):
        fields |= {f'{stack}_layers': n_layers, f'{stack}_ffn_dim': d_ff, f'{stack}_attention_heads': n_heads}
    return {'d_model': 16} | fields | others


def train_sentencepiece(texts, size=150):
    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=data, vocab_size=size, hard_vocab_limit=False, minloglevel=2,
        num_threads=1)
    return data.getvalue()


SENTENCEPIECE = [train_sentencepiece([pair[side] for pair in PAIRS]) for side in (0, 1)]


def pieces_of(*models):
    "The pieces of SentencePiece models, each once, without special ones."
    pieces = {}
    for data in models:
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
        pieces |= dict.fromkeys(model.id_to_piece(i) for i in range(len(model)))
    return [piece for piece in pieces if piece not in ('<unk>', '<s>', '</s>')]


def write_vocabulary(path, pieces):
    "Write a vocab.json in OPUS-MT's order; return its size."
    vocabulary = {piece: i for i, piece in enumerate(['</s>', '<unk>', *pieces, '<pad>'])}
    path.write_text(json.dumps(vocabulary))
    return len(vocabulary)


@torch.no_grad()
def random_marian(vocab_size, fields, std=0.15, target_vocab_size=None):
    "transformers' model with random weights: biases, gains and output bias included."
    torch.manual_seed(0)
    special = {'pad_token_id': vocab_size - 1, 'eos_token_id': 0, 'decoder_start_token_id': vocab_size - 1,
               'forced_eos_token_id': 0}
    config = {'vocab_size': vocab_size, 'decoder_vocab_size': target_vocab_size or vocab_size, 'bos_token_id': None,
              'max_position_embeddings': 64, 'activation_function': 'swish', 'scale_embedding': True, 'init_std': std}
    model = transformers.MarianMTModel(transformers.MarianConfig(**config | special | fields)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(std * torch.randn_like(parameter))
    model.final_logits_bias.normal_()
    model.generation_config = transformers.GenerationConfig(
        **special, bad_words_ids=[[vocab_size - 1]], renormalize_logits=True, num_beams=4, length_penalty=1.0,
        early_stopping='never', max_length=60)
    return model


@torch.no_grad()
def make_translations_end(model, late=6):
    "Let the logit of EOS grow with the position, so that translations by random weights end."
    src, tgt = torch.randint(2, model.config.vocab_size - 1, (2, 40, 24))
    tgt[:, 0] = model.config.decoder_start_token_id
    tables = [model.get_input_embeddings().weight, model.model.decoder.embed_tokens.weight]
    for table in {table.data_ptr(): table for table in tables}.values():
        table.mul_(0.5)
    model.final_logits_bias.mul_(0.3)
    states = model.model(input_ids=src, decoder_input_ids=tgt).last_hidden_state.mean(0)
    direction = states[late:late + 8].mean(0) - states[:3].mean(0)
    model.lm_head.weight[0] = 16 * direction / direction.square().sum()
    model.final_logits_bias[0, 0] = model.final_logits_bias.max() - states[late] @ model.lm_head.weight[0]


def write_marian(folder, ends=False, std=0.15, **fields):
    "Write a folder as on the Hugging Face Hub; return transformers' model."
    folder.mkdir()
    size = write_vocabulary(folder / 'vocab.json', pieces_of(*SENTENCEPIECE))
    model = random_marian(size, sizes() | fields, std)
    if ends:
        make_translations_end(model)
    model.save_pretrained(folder)
    for side, data in zip(('source', 'target'), SENTENCEPIECE):
        (folder / f'{side}.spm').write_bytes(data)
    (folder / 'tokenizer_config.json').write_text(json.dumps({'source_lang': 'en', 'target_lang': 'de'}))
    return model


def random_sources(vocab_size, n, seed=0):
    "Padded rows of random ids that end in EOS."
    rng = random.Random(seed)
    return pad_rows([[rng.randrange(4, vocab_size) for _ in range(rng.randrange(1, 16))] + [EOS] for _ in range(n)])


def random_targets(vocab_size, n, length=12, seed=1):
    "Rows of random ids that start with BOS."
    rng = random.Random(seed)
    return torch.tensor([[BOS] + [rng.randrange(4, vocab_size) for _ in range(length)] for _ in range(n)])


def their_ids(ids, rows):
    "Our ids as those of transformers: our PAD becomes theirs, which is the row of BOS."
    return torch.tensor([rows[BOS], *rows[1:]])[ids]
