"The page of results: every record in benchmarks/results, with its command, seed, machine, date and hash."
import hashlib
import html
import json
import re
from statistics import mean, median

from figures import long_bleu, main_figures
from project import CFG, NBS, PAGES, RESULTS, read_page

TEST_SETS = {'test_2016_flickr': 'Multi30k 2016', 'test_2017_mscoco': 'Multi30k 2017', 'test': 'test',
             'test_long': 'long sentences', 'test_combinations': 'new combinations'}


def load():
    "All records by name, each with the hash of its file."
    found = {}
    for path in sorted(RESULTS.glob('*.json')):
        record = json.loads(path.read_text(encoding='utf-8'))
        record['file_sha256'] = hashlib.sha256(path.read_bytes()).hexdigest()
        found[path.stem] = record
    return found


def seeds_within(value):
    "The seeds that the runs of a record name, wherever they stand."
    if isinstance(value, list):
        return set().union(*map(seeds_within, value))
    if not isinstance(value, dict):
        return set()
    found = {value['seed']} if isinstance(value.get('seed'), int) else set()
    if isinstance(value.get('seeds'), list):
        found |= {seed for seed in value['seeds'] if isinstance(seed, int)}
    if isinstance(value.get('seeds'), dict):
        found |= {int(seed) for seed in value['seeds'] if seed.isdigit()}
    return found.union(*map(seeds_within, value.values()))


def seeds_of(part):
    "The seeds of a record: those that it states, or those of its runs."
    stated = part.get('seed', part.get('seeds'))
    if isinstance(stated, int):
        seeds = {stated}
    else:
        seeds = seeds_within(part)
    return ', '.join(map(str, sorted(seeds)))


def sources(name, record):
    "Command, seeds, machine, date and hash of a record; of each of its parts if they were measured apart."
    parts = {'': record}
    if 'command' not in record:
        parts = {key: part for key, part in record.items() if isinstance(part, dict) and 'command' in part}
    for key, part in parts.items():
        device = part.get('versions', {}).get('device', '')
        machine = f"{device}, {part['machine']}" if device.startswith('NVIDIA') else part['machine']
        yield {'part': key, 'command': part['command'], 'seeds': seeds_of(part), 'machine': machine,
               'date': part['date'], 'weights': part.get('weights_sha256', ''), 'file': record['file_sha256']}


# Records whose pages name them in another way: complexity by its program, the others by a name put together or listed.
DISCUSSED = {'complexity': ['05_why_self_attention'], 'train-speed-gpu-base': ['24_kernels'],
             'train-speed-gpu-big': ['24_kernels'], 'train-speed-cpu': ['24_kernels'],
             'train-speed-cpu-bfloat16': ['24_kernels'], 'train-speed-0.1.0': ['24_kernels'],
             'decode-speed': ['63_engines'], 'decode-speed-tiny': ['63_engines'], 'decode-speed-0.1.0': ['63_engines'],
             'decode-speed-avx512': ['63_engines'], 'decode-speed-avx512-tiny': ['63_engines'],
             'decode-speed-avx512-small': ['63_engines'], 'decode-speed-avx512-base': ['63_engines'],
             'multi30k-en-de': ['10_english_to_german', '30_recipes', '34_your_own_data', '78_the_record_in_full'],
             'multi30k-en-de-seed2': ['10_english_to_german', '30_recipes', '78_the_record_in_full'],
             'multi30k-en-de-seed3': ['10_english_to_german', '30_recipes', '78_the_record_in_full'],
             'multi30k-de-en': ['30_recipes', '78_the_record_in_full'],
             'multi30k-en-fr': ['30_recipes', '34_your_own_data', '78_the_record_in_full'],
             'gpu-en-de-wide-seed1': ['10_english_to_german', '34_your_own_data'],
             'gpu-en-de-wide-seed2': ['10_english_to_german'], 'gpu-en-de-wide-seed3': ['10_english_to_german'],
             **{f'gpu-tok-{setting}-seed{seed}': ['46_the_record']
                for setting in ('r-drop', 'control') for seed in (1, 2, 3)}}


def pages_of(names):
    "The pages that read a record in their code, or link to it, by the record's name."
    found = {name: [page for page in DISCUSSED.get(name, []) if page in PAGES] for name in names}
    for stem in PAGES:
        text = '\n'.join(cell['source'] for cell in read_page(NBS / f'{stem}.ipynb')['cells'])
        for name in names:
            called = rf"(?:record|load_record|result|quality)\w*\(\s*'{re.escape(name)}'"
            if re.search(rf"results/{re.escape(name)}\.json|{called}|'{re.escape(name)}\.json'", text):
                found[name] = list(dict.fromkeys([*found[name], stem]))
    for name in names:
        is_scored = 'scores' in names[name] and (not found[name] or name.startswith('gpu-'))
        if is_scored and '78_the_record_in_full' in PAGES:
            found[name].append('78_the_record_in_full')
    return found


def cell(value, sort=None):
    sort = f' data-sort="{html.escape(str(sort), quote=True)}"' if sort is not None else ''
    return f'<td{sort}>{value}</td>'


def short_hash(value):
    return f'<code title="{value}">{value[:10]}</code>' if value else ''


def table(header, rows, label):
    "A table that sorts by any column."
    head = ''.join(f'<th scope="col"><button type="button">{name}</button></th>' for name in header)
    body = '\n'.join('<tr>' + ''.join(row) + '</tr>' for row in rows)
    return (f'\n```{{raw}} html\n<div class="wide-table" tabindex="0" role="region" aria-label="{label}">'
            f'<table class="sortable"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n```\n')


def how(source):
    "The cells that say how a figure was made."
    command = f'<code class="command">{html.escape(source["command"])}</code>'
    made = f'<details><summary>{html.escape(source["machine"])}</summary>{command}</details>'
    return [cell(source['seeds'] or '–'), cell(source['date']), cell(short_hash(source['weights'] or source['file'])),
            cell(made, source['machine'])]


def record_link(name):
    return f'<a href="{CFG["blob"]}/benchmarks/results/{name}.json">{name}</a>'


def task(name, record):
    "The corpus and the direction of a translation record."
    settings = record.get('settings', {}).get('corpus', {})
    pair = (settings.get('pair') or ('en-de' if 'en-de' in name else '')).upper()
    corpus = 'toy' if 'toy' in name else 'Multi30k'
    return f'{corpus} {pair}'.strip()


def quality(records):
    "One row for each translation record and test set, best first within a task; points for the plot."
    rows = []
    points = {'bleu': [], 'lowercased_tokenized_bleu': []}
    for name, record in records.items():
        for split, scores in record.get('scores', {}).items():
            if split == 'val':
                continue
            kind = 'bleu' if 'bleu' in scores else 'lowercased_tokenized_bleu'
            bleu = scores[kind]
            half = scores.get(f'{kind.removesuffix("_bleu")}_half_width', scores.get('bleu_half_width'))
            source = next(sources(name, record))
            metrics = record['metrics']
            minutes = metrics.get('training_minutes')
            label = TEST_SETS.get(split, split)
            shown = f'{bleu:.2f}' + (f' ± {half:.2f}' if half else '')
            note = '' if kind == 'bleu' else ' <small>lower case, tokenized</small>'
            chrf = scores.get('chrf', scores.get('lowercased_tokenized_chrf'))
            search = record.get('search', {})
            beam = search.get('beam_size', '')
            row = [cell(task(name, record)), cell(label), cell(shown + note, f'{bleu:.3f}'),
                   cell(f'{chrf:.2f}' if chrf else ''),
                   cell(f'{metrics["parameters"]:,}', metrics['parameters']),
                   cell(f'{minutes:.0f}' if minutes else '', minutes or ''),
                   cell(beam), cell(record_link(name)), *how(source)]
            rows.append((task(name, record), label, -bleu, row))
            points[kind].append((f'{name}, {label}', bleu, bleu - (half or 0), bleu + (half or 0)))
    rows.sort(key=lambda row: row[:3])
    return [row[3] for row in rows], points


def ticks_of(highest):
    "About five round numbers from 0 to the largest value."
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
                if highest / step <= 6)
    n_steps = int(highest / step) + 1
    return [step * i for i in range(n_steps + 1)]


def plot(points, title, in_order=False):
    """Values with their intervals (name, value, low, high), the best on top, as HTML that fits a desk and a phone.

    The style sheet puts a name beside its value, or above it where the screen is narrow.
    """
    if not in_order:
        points = sorted(points, key=lambda point: -point[1])
    ticks = ticks_of(max(high for *_, high in points))

    def place(value):
        return f'{100 * value / ticks[-1]:.2f}%'
    scale = ''.join(f'<span style="left:{place(tick)}">{tick:,}</span>' for tick in ticks)
    rows = []
    for name, value, low, high in points:
        width = f'{100 * (high - low) / ticks[-1]:.2f}%'
        rows.append(f'<div class="name">{html.escape(name)}</div>'
                    f'<div class="track" style="--step:{place(ticks[1])}">'
                    f'<span class="interval" style="left:{place(low)};width:{width}"></span>'
                    f'<span class="dot" style="left:{place(value)}" title="{value:,.4g}"></span></div>')
    title = html.escape(title)
    return (f'\n```{{raw}} html\n<figure class="plot"><figcaption>{title}</figcaption>'
            f'<div class="chart" role="img" aria-label="{title}"><div class="name"></div>'
            f'<div class="scale">{scale}</div>' + ''.join(rows) + '</div></figure>\n```\n')


def speed(records):
    "Training speed beside other implementations."
    rows = []
    points = []
    for record_name, record in records.items():
        if not record_name.startswith('train-speed'):
            continue
        source = next(sources(record_name, record))
        device = 'GPU' if source['machine'].startswith('NVIDIA') else 'CPU'
        for size, metrics in record['metrics'].items():
            best = max(metrics['tokens_per_second'].values())
            for name, tokens in metrics['tokens_per_second'].items():
                rounds = metrics['rounds'][name]
                slowest, fastest = (tokens * median(rounds) / seconds for seconds in (max(rounds), min(rounds)))
                shown = f'{tokens:,} ({slowest:,.0f} to {fastest:,.0f})'
                memory = metrics['peak_mib'].get(name, '')
                ratio, beside = '', ''
                if name == 'annotated_transformer' and 'speedup_of_best' in metrics:
                    ratio = metrics['speedup_of_medians']
                    beside = f"{ratio:.2f} ({metrics['speedup_of_best']:.2f})"
                rows.append([cell(size), cell(name), cell(shown, tokens), cell(beside, ratio), cell(memory, memory),
                             *how(source)])
                shares = [100 * value / best for value in (tokens, slowest, fastest)]
                points.append((f'{size}, {device}: {name}', *shares))
    header = ['size', 'implementation', 'tokens per second (slowest to fastest round)',
              'times the fastest other: medians (best rounds)', 'peak MiB', *HOW]
    title = ('Training: tokens per second, in % of the fastest implementation of the same size; '
             'lines: slowest and fastest round')
    return ('\n## Speed of training\n' + table(header, rows, 'Speed of training')
            + plot(points, title, in_order=True))


def decoding_speed(records):
    "Sentences per second of engines, by model, beam and batch."
    rows = []
    points = []
    units = {'ids': 'ids', 'text': 'text, with tokenization'}
    names = [name for name in records if name.startswith('decode-speed')]

    def by_size(name):
        model = records[name]['settings']['model']
        return model['d_model'], model['n_layers'], name

    for record_name in sorted(names, key=by_size):
        record = records[record_name]
        size = record['settings']['size'] or 'toy'
        source = next(sources(record_name, record))
        for row in record['metrics']:
            value = row['sentences_per_second']
            latency = row.get('latency_ms') # of single sentences
            milliseconds = f"{latency['median']:.1f} ({latency['95 %']:.1f})" if latency else ''
            shown = f"{value:,.1f} ({row['slowest']:,.1f} to {row['fastest']:,.1f})"
            measured = source | {'date': row.get('measured', source['date'])}
            rows.append([cell(size), cell(row['engine']), cell(row['beam']), cell(row['batch']),
                         cell(units[row['unit']]), cell(row['threads']), cell(shown, value),
                         cell(milliseconds, latency['median'] if latency else ''), cell(record_link(record_name)),
                         *how(measured)])
            if record_name == 'decode-speed' and (row['beam'], row['batch'], row['unit']) == (4, 64, 'ids'):
                points.append((row['engine'], value, row['slowest'], row['fastest']))
    header = ['model', 'engine', 'beam', 'batch', 'from and to', 'threads',
              'sentences per second (slowest to fastest round)', 'median latency (95th percentile), ms', 'record', *HOW]
    title = ('Decoding the toy model, from ids to ids, beam 4, batches of 64: sentences per second; '
             'lines: slowest and fastest round')
    return ('\n## Speed of decoding\n' + table(header, rows, 'Speed of decoding') + plot(points, title))


def experiments(records):
    "Plots of two records whose figures form a curve."
    sizes = [(f"{run['pairs']:,} pairs", run['bleu'], run['bleu'] - run['bleu_half_width'],
              run['bleu'] + run['bleu_half_width']) for run in records['data-sizes']['runs']]
    long = [(name.replace(', ', ', trained on '), mean(values), min(values), max(values))
            for name, values in long_bleu(records['positions']).items()]
    return ('\n## Two experiments\n\n[Page 34](34_your_own_data.ipynb) and [page 40](40_relative_positions.ipynb) '
            'discuss them.\n'
            + plot(sizes, 'Multi30k EN-FR, test 2016: sacreBLEU after training on part of the text, with 95% bootstrap '
                   'intervals', in_order=True)
            + plot(long, 'Toy EN-DE, long sentences: BLEU by positions and training set; lines: range over seeds'))


HOW = ['seed', 'date', 'hash', 'machine and command']


def all_records(records):
    used = pages_of(records)
    rows = []
    for name, record in records.items():
        pages = ', '.join(f'<a href="{stem}.html">{stem[:2]} {PAGES[stem]["title"]}</a>' for stem in used[name])
        for source in sources(name, record):
            figures = html.escape('; '.join(main_figures(name, record, source['part'])))
            link = record_link(name) + (f" <small>{source['part']}</small>" if source['part'] else '')
            figures = f'<span class="figures">{figures}</span>'
            rows.append([cell(link), cell(figures), cell(pages or '–'), *how(source)])
    return table(['record', 'main figures', 'discussed on', *HOW], rows, 'All records')


def page(summary, caption):
    "The page of results, in MyST Markdown."
    records = load()
    rows, points = quality(records)
    cased = [point for point in points['bleu'] if not point[0].startswith('toy')]
    header = ['task', 'test set', 'BLEU', 'chrF', 'parameters', 'minutes', 'beam', 'record', *HOW]
    signature = records['multi30k-en-de']['scores']['test_2016_flickr']['signature']
    return f"""# Results

Every figure comes from a record in the repository. A record names the command, the seed, the machine and the date, and
keeps its settings; the hash is the SHA-256 of the weights, or of the record where there are none (point at it to see
all of it), and the command stands below the machine. [Page 78](78_the_record_in_full.ipynb) discusses the Multi30k
results, and what they do not show.

## The main rows

{caption}

{summary}

## Translation quality

sacreBLEU on cased, detokenized text (`{signature}`), ± half of the 95% bootstrap interval. Rows marked *lower case,
tokenized* follow the convention of older papers and cannot be compared with the others. Click on a column to
sort by it.
{table(header, rows, 'Translation quality')}
{plot(cased, 'sacreBLEU of the Multi30k records on cased, detokenized text, with 95% bootstrap intervals')}
{plot(points['lowercased_tokenized_bleu'], 'BLEU on lower-case, tokenized text, with 95% bootstrap intervals')}
{speed(records)}
{decoding_speed(records)}
{experiments(records)}
## All records

Every record with its main figures. A range in parentheses is over seeds, or an interval where the record states one.
{all_records(records)}
"""
