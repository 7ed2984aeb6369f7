#!/usr/bin/env python3
"""Convert a model folder of version 0.1.0, so that the current version can load it.

    python tools/convert_v1.py OLD NEW

The numbers of the weights stay as they are, only names change. NEW must not exist; OLD is not touched.
Models with pruned heads and recurrent models must be trained again, imported Marian models imported again.
"""
import argparse
import re
import shutil
import sys
from pathlib import Path

import safetensors.torch

from annotated_transformer.checkpoints import config_from_json, load_model
from annotated_transformer.files import atomic_folder, atomic_write, read_json, to_json
from annotated_transformer.vocabulary import load_tokenizer

TENSORS = [ # (pattern in an old name, its replacement)
    (r'attention\.query\.', 'attention.q_proj.'),
    (r'attention\.key\.', 'attention.k_proj.'),
    (r'attention\.value\.', 'attention.v_proj.'),
    (r'attention\.output\.', 'attention.out_proj.'),
    (r'feed_forward\.inner\.', 'feed_forward.linear1.'),
    (r'feed_forward\.outer\.', 'feed_forward.linear2.'),
    (r'add_norms\.0\.', 'residual1.'),
    (r'add_norms\.1\.', 'residual2.'),
    (r'add_norms\.2\.', 'residual3.'),
    (r'^output\.', 'lm_head.'),
]
DECODING = {
    'alpha': 'length_penalty',
    'length_offset': 'length_penalty_offset',
    'max_extra': 'max_extra_tokens',
    'min_len': 'min_length',
    'no_repeat_ngram': 'no_repeat_ngram_size',
}
TRAINING = {
    'warmup': 'warmup_steps',
    'peak_rate': 'peak_lr',
    'clip_norm': 'max_grad_norm',
    'average': 'average_checkpoints',
    'accumulate': 'gradient_accumulation_steps',
    'ema': 'ema_decay',
}
PROGRESS = {'loss': 'loss_sum', 'counted': 'loss_tokens'}
NOTE = 'Trained and scored with version 0.1.0. The weights are the same numbers; fields and tensors have new names.'


def tensor_name(name):
    "Return the new name of a tensor."
    for pattern, replacement in TENSORS:
        name = re.sub(pattern, replacement, name)
    return name


def rename(fields, names):
    "Return a dictionary with some keys renamed, in the same order."
    return {names.get(key, key): value for key, value in fields.items()}


def convert_config(old):
    "Return the new config.json. Raises ValueError for a model that cannot be converted."
    if 'kind' in old:
        raise ValueError(f'models of kind {old["kind"]!r} cannot be converted: train this model again')
    if 'n_layers' not in old:
        raise ValueError('config.json is not one of version 0.1.0')
    if old.get('kept_heads'):
        raise ValueError('models with pruned heads cannot be converted: train and prune this model again')
    if old.get('activation', 'relu') != 'relu' or old.get('output_bias'):
        raise ValueError('imported Marian models cannot be converted: import this model again')
    kind = 'relative' if old['positions'] in ('rotary', 'alibi') else 'transformer'
    gone = ('init', 'activation', 'output_bias', 'kept_heads')
    return {'kind': kind} | {key: value for key, value in old.items() if key not in gone}


def convert_decoding(old):
    "Return decoding settings by their new names."
    new = rename(old, DECODING)
    if new.get('patience') == 0:
        new['patience'] = None
    return new


def convert_record(old, config, init):
    "Return the new training.json: the same record, by the new names."
    new = {'converted_from': {'version': '0.1.0', 'note': NOTE}} | old
    if 'run' in new:
        training = rename(old['run']['training'], TRAINING)
        training.pop('fused', None) # Adam's implementation, not a hyperparameter
        new['run'] = old['run'] | {'model': config, 'training': training | {'init': init}}
    if 'progress' in new:
        new['progress'] = rename(old['progress'], PROGRESS)
    if 'decoding' in new:
        new['decoding'] = convert_decoding(old['decoding'])
    return new


def convert(old, new):
    """Convert a model folder.

    Raises FileNotFoundError, FileExistsError, or ValueError for a model that cannot be converted.
    """
    old = Path(old)
    new = Path(new)
    if new.exists():
        raise FileExistsError(f'{new} exists: choose another folder')
    for name in ('config.json', 'model.safetensors'):
        if not (old / name).is_file():
            raise FileNotFoundError(f'{old} is not a model folder: it has no {name}')
    old_config = read_json(old / 'config.json')
    config = convert_config(old_config)
    config_from_json(config) # raises for settings that the current version does not know
    weights = safetensors.torch.load_file(old / 'model.safetensors')
    weights = {tensor_name(name): tensor for name, tensor in weights.items()}
    record = read_json(old / 'training.json', default={})
    with atomic_folder(new) as folder:
        atomic_write(folder / 'config.json', to_json(config))
        atomic_write(folder / 'model.safetensors', safetensors.torch.save(weights))
        record = convert_record(record, config, old_config.get('init', 'glorot'))
        atomic_write(folder / 'training.json', to_json(record))
        if (old / 'tokenizer.json').is_file():
            load_tokenizer(old / 'tokenizer.json') # raises for a file of another format
            shutil.copyfile(old / 'tokenizer.json', folder / 'tokenizer.json')
        load_model(folder) # raises unless names and shapes fit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('old', type=Path, metavar='OLD', help='a model folder that version 0.1.0 wrote')
    parser.add_argument('new', type=Path, metavar='NEW', help='the folder to write')
    args = parser.parse_args()
    try:
        convert(args.old, args.new)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f'{args.old} was not converted: {error}')
    print(f'{args.new} can be loaded by the current version.')


if __name__ == '__main__':
    main()
