"""The main figures of each record, in a few words, for the page of results.

A record with BLEU scores, and one with a function below, shows what was measured; any other one its first numbers.
"""
from statistics import geometric_mean, mean


def decimals(value, digits=2):
    return f'{value:,.{digits}f}'


def number(value):
    "A number with as many decimals as its size needs."
    if isinstance(value, int) or abs(value) >= 100:
        return f'{value:,.0f}'
    return f'{value:,.2f}'


def over_seeds(values, digits=1):
    "The mean, and the range over seeds."
    if len(values) == 1:
        return decimals(values[0], digits)
    return f'{decimals(mean(values), digits)} ({decimals(min(values), digits)} to {decimals(max(values), digits)})'


def scores(record):
    kinds = {'bleu': 'BLEU', 'lowercased_tokenized_bleu': 'BLEU of lower case, tokenized text'}
    found = []
    for split, values in record['scores'].items():
        if split != 'val':
            kind = 'bleu' if 'bleu' in values else 'lowercased_tokenized_bleu'
            found.append(f'{kinds[kind]} {values[kind]:.2f} ({split})')
    return found


def attention_adversaries(record):
    found = [f"alignment error of the model {record['alignment_error']:.2f}"]
    for name, points in record['points'].items():
        found.append(f"{name}: {mean(point['alignment_error'] for point in points):.2f}")
    return found


def bugs(record):
    planted = [row for name, row in record['bugs'].items() if name != 'correct']
    found = [row for row in planted if row['found_by'] in row['failed']]
    second_set = [row for name, row in record['held_out'].items() if not name.endswith(': correct')]
    return [f'{len(found)} of {len(planted)} planted bugs found',
            f"{sum(bool(row['failed']) for row in second_set)} of {len(second_set)} held-out bugs",
            f"{len(record['bugs']['correct']['failed'])} alarms on the correct model"]


def more_bugs(record):
    planted = [row for name, row in record['bugs'].items() if not name.endswith(': correct')]
    correct = [row for name, row in record['bugs'].items() if name.endswith(': correct')]
    return [f"{sum(bool(row['failed']) for row in planted)} of {len(planted)} planted bugs found",
            f"{sum(bool(row['failed']) for row in correct)} alarms on {len(correct)} correct models"]


def caption_attention(record):
    return [f"{kind} translation: chrF {pair['chrf']:.0f}, mean of the largest attention weights "
            f"{mean(map(max, pair['weights'])):.2f}" for kind, pair in record['sentences'].items()]


def claims(record):
    cases = record['cases']
    runs = [run for case in cases.values() for run in case['runs']]
    return [f'{len(cases)} settings, {len(runs)} runs',
            'test BLEU of the base ' + over_seeds([run['test_bleu'] for run in cases['base']['runs']])]


def complexity(record):
    found = []
    for name in ('self-attention, equation 1', 'self-attention, fused', 'recurrent', 'convolutional'):
        longest = record['metrics'][name][-1]
        found.append(f"{name}: {longest['forward_ms'] + longest['backward_ms']:.1f} ms at n = {longest['n']:,}")
    return found


def data_sizes(record):
    return [f"BLEU {run['bleu']:.1f} with {run['pairs']:,} pairs" for run in record['runs']]


def decode_speed(record):
    found = []
    for row in record['metrics']:
        if (row['beam'], row['batch'], row['unit']) == (4, 64, 'ids') and 'can win' not in row['engine']:
            found.append(f"{row['engine']}: {number(row['sentences_per_second'])}")
    return ['sentences per second with beam 4 and batches of 64', *found]


def engines(record):
    return [f"{name}: BLEU {row['bleu']:.2f}, {row['same']:,} of {record['sentences']:,} sentences as in PyTorch"
            for name, row in record['metrics'].items()]


def errors(record):
    kinds = {name: mean(kind['shares']) for name, kind in record['kinds'].items()}
    found = [f'{name}: {100 * share:.1f}%' for name, share in sorted(kinds.items(), key=lambda kind: -kind[1])[:4]]
    return [*found, f"none of the {len(kinds)} kinds: {100 * mean(record['none_of_them']):.1f}%"]


def gender_path(record):
    return [f"{name}: patching effect of heads {' and '.join(model['two_strongest']['heads'])} "
            f"{model['two_strongest']['patching']:.2f}" for name, model in record['models'].items()]


def gpu_six_minutes(record):
    return [f"{name}: BLEU {mean(found['val_bleu']):.2f} on val, {mean(found['test_bleu']):.2f} on the test set"
            for name, found in record['metrics'].items()]


def head_orders(record):
    names = {'learned': 'learned gates', 'by_gradient_trained': 'heads chosen by gradient, then trained',
             'random_trained': 'random heads, then trained'}
    gates = record['gates']
    shares = [f'{words}: {100 * mean(gate[name] for gate in gates):.1f}%'
              for name, words in names.items() if all(name in gate for gate in gates)]
    return [f'{len(gates)} pruned models, exact translations', *shares]


def heads(record):
    metrics = record['metrics']
    return [f"BLEU {metrics['bleu']:.1f} with all {len(metrics['heads'])} heads",
            f"largest loss of BLEU without one head {max(head['bleu'] for head in metrics['heads']):.2f}",
            f"rank correlation of gradient and loss {metrics['rank_correlation']['gradient and loss']:.2f}"]


def inference(record):
    same = sum(row['same'] for row in record['equality'].values())
    total = sum(row['sentences'] for row in record['equality'].values())
    times = [f'{name}: {value:.1f} ms a sentence' for name, value in record['milliseconds'].items()]
    return [*times, f'same output as the reference in {same:,} of {total:,} sentences']


def kills(record):
    result = record['result']
    return [f"{result['kills']} kills, {result['while_saving']} of them while saving",
            f"{result['files_that_differ']} of {result['files_compared']} files differ in the end"]


def large_corpus(record):
    return [f"{size['pairs'] / 1e6:,.0f} million pairs: prepared in {size['prepare_minutes']:.1f} minutes, "
            f"training in {size['train_peak_mb']:,.0f} MB" for size in record['metrics']['sizes']]


def memory(record):
    return [f"caches of {capacity} entries: {run['resident_mib'][-1]:,} MiB after {run['steps']} steps"
            for capacity, run in record['runs'].items()]


def own_experiment(record):
    losses = {}
    for name, loss in record['values'].items():
        losses.setdefault(name.split(', seed')[0], []).append(loss)
    return [f'{name}: loss {mean(values):.3f}, mean of {len(values)} seeds' for name, values in losses.items()
            if len(values) > 50]


def mbr(record):
    searches = {'beam search': 'beam search', 'chrF': 'minimum Bayes risk with chrF',
                'BLEU': 'minimum Bayes risk with BLEU'}
    return [f"{words}: BLEU {record['test'][name]['bleu']:.2f}, chrF {record['test'][name]['chrf']:.2f} "
            '(lower case, tokenized)' for name, words in searches.items()]


def paired(record):
    return [f"{pair['a']} against {pair['b']}: {pair['difference']:+.2f} BLEU "
            f"({pair['low']:+.2f} to {pair['high']:+.2f})" for pair in record['comparisons']]


def long_bleu(record):
    "BLEU on long sentences of each case of the record on positions, one value a seed."
    return {name: [run['test_long']['by_words']['all']['bleu'] for run in runs]
            for name, runs in record['cases'].items()}


def positions(record):
    values = long_bleu(record)
    best = max(values, key=lambda name: mean(values[name]))
    return [f'BLEU on long sentences of {name}: {over_seeds(values[name])}'
            for name in dict.fromkeys(['sinusoidal, short', 'rotary, short', best])]


def processes(record):
    found = []
    for size, metrics in record['metrics'].items():
        step = {name: seconds['median'] for name, seconds in metrics['step_seconds'].items()}
        found.append(f"{size}: two processes are {step['one'] / step['strong']:.2f} times as fast on the same batch, "
                     f"{2 * step['one'] / step['weak']:.2f} on twice the batch; "
                     f"{metrics['bytes_per_step'] / 1e6:.1f} MB of gradients a step")
    return found


def recipe(record):
    metrics = record['metrics']
    return [f"val BLEU {metrics['mean']:.2f}, standard deviation over seeds {metrics['spread']:.2f}",
            f"{len(metrics['variants'])} variants"]


def recipe_paired(record):
    metrics = record['metrics']
    told_apart = [name for name, found in metrics['paired'].items()
                  if min(found['val_bleu']['corrected']) > 0 or max(found['val_bleu']['corrected']) < 0]
    return [f"val BLEU after {record['epochs']} epochs {metrics['mean']:.2f}, mean of {len(record['seeds'])} seeds",
            f"{len(metrics['paired'])} changes of one setting, {len(told_apart)} told apart from luck in BLEU"]


def recurrent(record, part):
    if part == 'sweep':
        return [f"{model}: best learning rate {min(losses, key=losses.get)}, val loss {min(losses.values()):.2f}"
                for model, losses in record['val_loss'].items()]
    found = {}
    if part == 'gradients':
        for run in record['runs']:
            near, far = (run['after']['norms'][distance] for distance in (1, 20))
            found.setdefault(run['model'], []).append(far / near)
        return [f'{model}: gradient at distance 20, relative to distance 1: {geometric_mean(ratios):.2g}'
                for model, ratios in found.items()]
    minutes = max(run['minutes'] for run in record['runs'])
    for run in record['runs']:
        if run['minutes'] < minutes:
            continue
        test = run.get('test', run.get('test_2016_flickr'))
        found.setdefault(run['model'], []).append(test['bleu'] if isinstance(test, dict) else test)
    return [f'{model}: BLEU {over_seeds(values)} after {minutes} minutes' for model, values in found.items()]


def serving(record):
    found = [f"{record['soak']['good']:,} of {record['soak']['requests']:,} requests valid, "
             f"{record['soak']['own_translation']:,} answered with their own translation"]
    parts = {'shipped': 'toy model', 'recipe': 'Multi30k model', 'recipe_patience': 'Multi30k model, --beam-patience 1'}
    for part, name in parts.items():
        _, offline, _ = record[part]['offline']
        _, served, _ = record[part]['served']
        found.append(f'{name}: {served:.0f} sentences per second served, {offline:.0f} offline')
    return found


def site(record):
    phone = [page['phone']['performance'] for page in record['pages'].values()]
    desk = [page['desk']['performance'] for page in record['pages'].values()]
    return [f'Lighthouse, phone: {min(phone)} to {max(phone)}', f'desk: {min(desk)} to {max(desk)}',
            f"live explainer ready after {record['explainer']['ready_ms'] / 1000:.1f} s",
            f"load average of the machine {min(record['load'])} to {max(record['load'])}"]


def toy_errors(record):
    seeds = record['seeds'].values()
    return [f"{split}: {over_seeds([100 * seed[split]['exact'] / seed[split]['sentences'] for seed in seeds])}% exact"
            for split in ('test', 'test_combinations', 'test_long')]


def train_speed(record):
    return [f"{size}: {metrics['tokens_per_second']['annotated_transformer']:,} tokens per second; "
            f"{metrics['fastest_other']}, the fastest other: "
            f"{metrics['tokens_per_second'][metrics['fastest_other']]:,}"
            for size, metrics in record['metrics'].items()]


def vocabulary_size(record):
    return [f"{kind}, {rows[-1]['tokens']:,} tokens: {rows[-1]['tokens_per_sentence']:.1f} a sentence, "
            f"{100 * rows[-1]['unknown']:.1f}% unknown" for kind, rows in record['kinds'].items()]


PICKERS = {
    'attention-adversaries': attention_adversaries, 'bugs': bugs,
    'caption-attention': caption_attention, 'claims': claims, 'complexity': complexity, 'data-sizes': data_sizes,
    'decode-speed': decode_speed, 'engines': engines, 'errors': errors, 'gender-path': gender_path,
    'gpu-six-minutes': gpu_six_minutes, 'head-orders': head_orders, 'heads': heads, 'inference': inference,
    'kills': kills, 'large-corpus': large_corpus,
    'mbr': mbr, 'memory': memory, 'more-bugs': more_bugs, 'own-experiment': own_experiment, 'paired': paired,
    'positions': positions, 'processes': processes, 'recipe': recipe, 'recipe-paired': recipe_paired,
    'serving': serving, 'site': site, 'toy-errors': toy_errors, 'train-speed': train_speed,
    'vocabulary-size': vocabulary_size,
}


def first_numbers(value, name='', depth=0):
    "The first numbers of a record, with their names; none of when and where it was made."
    if isinstance(value, bool) or depth > 3:
        return []
    if isinstance(value, (int, float)):
        return [f'{name} {number(value)}']
    found = []
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ('versions', 'settings', 'seed', 'seeds', 'cpu_seconds', 'search'):
                found += first_numbers(inner, f'{name} {key}'.strip().replace('_', ' '), depth + 1)
    return found[:3]


def main_figures(name, record, part=''):
    "The main figures of a record, or of the part of it that was measured by a command of its own."
    if 'scores' in record:
        return scores(record)
    if name == 'recurrent':
        return recurrent(record[part], part)
    for kind in ('decode-speed', 'train-speed'): # records of several sizes, devices and versions
        if name.startswith(kind):
            return PICKERS[kind](record)
    if name in PICKERS:
        return PICKERS[name](record)
    return first_numbers(record[part] if part else record)
