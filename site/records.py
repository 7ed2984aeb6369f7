"The page of results: every record in benchmarks/results, with its command, seed, machine, date and hash."
import hashlib
import html
import json
import re
from statistics import median

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


def sources(name, record):
    "Command, seeds, machine, date and hash of a record; of each of its parts if they were measured apart."
    parts = [record] if 'command' in record else [p for p in record.values() if isinstance(p, dict) and 'command' in p]
    for part in parts:
        seeds = part.get('seed', part.get('seeds', part.get('settings')))
        if isinstance(seeds, dict):
            seeds = seeds.get('seeds', '') if 'seeds' in seeds else ''
        seeds = ', '.join(map(str, seeds)) if isinstance(seeds, (list, tuple)) else str(seeds or '')
        if not re.fullmatch(r'[\d, ]*', seeds):
            seeds = ''
        found = re.search(r'--seeds? ([\d ]+)', part['command'])
        seeds = seeds or (', '.join(found[1].split()) if found else '')
        device = part.get('versions', {}).get('device', '')
        machine = f"{device}, {part['machine']}" if device.startswith('NVIDIA') else part['machine']
        yield {'command': part['command'], 'seeds': seeds, 'machine': machine, 'date': part['date'],
               'weights': part.get('weights_sha256', ''), 'file': record['file_sha256']}


def pages_of(names):
    "The pages whose code reads a record, by the record's name."
    found = {name: [] for name in names}
    for stem in PAGES:
        code = '\n'.join(c['source'] for c in read_page(NBS / f'{stem}.ipynb')['cells'] if c['cell_type'] == 'code')
        for name in names:
            if re.search(rf"results/{re.escape(name)}\.json|(?:record|load_record|result)\w*\(\s*'{re.escape(name)}'"
                         rf"|'{re.escape(name)}\.json'", code):
                found[name].append(stem)
    for name in names:
        if 'scores' in names[name] and '46_the_record' in PAGES and not found[name]:
            found[name] = ['46_the_record']
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
    return [cell(source['seeds']), cell(html.escape(source['machine'])), cell(source['date']),
            cell(short_hash(source['weights'] or source['file'])), cell(command)]


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
    points = []
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
            search = record.get('search', {})
            beam = search.get('beam_size', '')
            row = [cell(task(name, record)), cell(label), cell(shown + note, f'{bleu:.3f}'),
                   cell(f'{scores["chrf"]:.2f}' if 'chrf' in scores else ''),
                   cell(f'{metrics["parameters"]:,}', metrics['parameters']),
                   cell(f'{minutes:.0f}' if minutes else '', minutes or 0),
                   cell(beam), cell(record_link(name)), *how(source)]
            rows.append((task(name, record), label, -bleu, row))
            points.append((f'{name}, {label}', bleu, half or 0, kind))
    rows.sort(key=lambda row: row[:3])
    return [row[3] for row in rows], points


def plot(points):
    "Scores with their intervals, as a drawing in the page's own colours."
    points = sorted((p for p in points if p[3] == 'bleu' and not p[0].startswith('toy')), key=lambda p: -p[1])
    left, width, height = 330, 420, 22
    low, high = 15, 65

    def x(bleu):
        return left + width * (bleu - low) / (high - low)
    lines = []
    for tick in range(20, 70, 10):
        at = f'{x(tick):.1f}'
        lines.append(f'<line class="grid" x1="{at}" x2="{at}" y1="24" y2="{30 + height * len(points)}"/>'
                     f'<text class="tick" x="{at}" y="16" text-anchor="middle">{tick}</text>')
    for i, (name, bleu, half, _) in enumerate(points):
        y = 40 + height * i
        lines.append(f'<text x="{left - 14}" y="{y + 4}" text-anchor="end">{html.escape(name)}</text>'
                     f'<line class="interval" x1="{x(bleu - half):.1f}" x2="{x(bleu + half):.1f}" y1="{y}" y2="{y}"/>'
                     f'<circle cx="{x(bleu):.1f}" cy="{y}" r="4"/>')
    size = f'0 0 {left + width + 20} {44 + height * len(points)}'
    title = 'sacreBLEU of every Multi30k record, with 95% bootstrap intervals'
    return (f'\n```{{raw}} html\n<div class="wide-table" tabindex="0" role="region" aria-label="{title}">'
            f'<svg class="plot" viewBox="{size}" width="{left + width + 20}" role="img" aria-label="{title}">'
            + ''.join(lines) + '</svg></div>\n```\n')


def speed(records):
    "Training speed beside other implementations."
    rows = []
    for record_name, record in records.items():
        if not record_name.startswith('train-speed'):
            continue
        source = next(sources(record_name, record))
        for size, metrics in record['metrics'].items():
            for name, tokens in metrics['tokens_per_second'].items():
                rounds = metrics['rounds'][name]
                slowest, fastest = (tokens * median(rounds) / seconds for seconds in (max(rounds), min(rounds)))
                shown = f'{tokens:,} ({slowest:,.0f} to {fastest:,.0f})'
                memory = metrics['peak_mib'].get(name, '')
                rows.append([cell(size), cell(name), cell(shown, tokens), cell(memory, memory), *how(source)])
    header = ['size', 'implementation', 'tokens per second (slowest to fastest round)', 'peak MiB', *HOW]
    return '\n## Speed of training\n' + table(header, rows, 'Speed of training')


HOW = ['seed', 'machine', 'date', 'hash', 'command']


def all_records(records):
    used = pages_of(records)
    rows = []
    for name, record in records.items():
        pages = ', '.join(f'<a href="{stem}.html">{stem[:2]} {PAGES[stem]["title"]}</a>' for stem in used[name])
        for source in sources(name, record):
            rows.append([cell(record_link(name)), cell(pages), *how(source)])
    return table(['record', 'discussed on', *HOW], rows, 'All records')


def page(summary, caption):
    "The page of results, in MyST Markdown."
    records = load()
    rows, points = quality(records)
    header = ['task', 'test set', 'BLEU', 'chrF', 'parameters', 'minutes', 'beam', 'record', *HOW]
    signature = records['multi30k-en-de']['scores']['test_2016_flickr']['signature']
    return f"""# Results

Every figure comes from a record in the repository. A record names the command, the seed, the machine and the date, and
keeps its settings; the hash is the SHA-256 of the weights, or of the record where there are none (point at it to see
all of it). [Page 46](46_the_record.ipynb) discusses the Multi30k results, and what they do not show.

## The main rows

{caption}

{summary}

## Translation quality

sacreBLEU on cased, detokenized text (`{signature}`), ± half of the 95% bootstrap interval. Rows marked *lower case,
tokenized* follow the convention of older papers and cannot be compared with the others. Click on a column to
sort by it.
{table(header, rows, 'Translation quality')}
{plot(points)}
{speed(records)}
## All records
{all_records(records)}
"""
