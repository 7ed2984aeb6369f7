#!/usr/bin/env python3
"""What the pages need beyond nbdev: the address on each of them, running in place, the README, a check.

masthead       write the address of settings.ini into every page: its Colab badge, and the cell that installs there
run [NAME …]   execute pages in place, one after the other (all of them by default), and clean them
export         write the modules from the pages, with the comments behind parameters in docstrings
readme         write README.md from the front page, with the results that it stores, and the list of pages
check          change nothing: say what a masthead, an export, a clean or a readme would alter,
               and what no page may hold
"""
import argparse, difflib, json, os, re, shutil, subprocess, sys, tempfile, time
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 10_000_000                                  # of all pages, outputs included
BADGE = '[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]'
MACHINE_PATH = re.compile(r'(?<![\w.:/-])/(?:work|farm|root|home|Users|tmp|private|mnt|opt|usr|var)/[\w.-]')
SKIPPED = re.compile(r'^#\s*\|\s*(eval:\s*false|notest|skip_exec)', re.M | re.I)
LEFT_ALONE = shutil.ignore_patterns('.git', '.venv', 'runs', 'build', 'dist', '*.egg-info', '__pycache__',
                                    '.pytest_cache', '.ipynb_checkpoints', '_proc', '_docs')


def settings(root=ROOT):
    "The project's settings.ini, as nbdev reads it."
    config = ConfigParser()
    config.read(root/'settings.ini', encoding='utf-8')
    return config['DEFAULT']

def pages(names=()):
    "The pages in reading order, the front page last, since it speaks of the others; or those named."
    found = {p.stem: p for p in sorted((ROOT/settings()['nbs_path']).glob('*.ipynb'))}
    found['index'] = found.pop('index', None)
    wanted = [Path(n).stem for n in names] or [n for n, p in found.items() if p]
    unknown = [n for n in wanted if not found.get(n)]
    if unknown: raise SystemExit(f'no page called {", ".join(unknown)}; there are: {", ".join(found)}')
    return [found[n] for n in wanted]

def read(path):
    "A page as a dictionary, each cell's source as one string."
    try: nb = json.loads(path.read_text(encoding='utf-8'))
    except ValueError as e: raise SystemExit(f'{path.name} is not a notebook: {e}')
    for cell in nb['cells']: cell['source'] = ''.join(cell['source'])
    return nb

def write(nb, path):
    "Write a page as nbdev does, so that cleaning it afterwards changes nothing."
    cells = [{**c, 'source': c['source'].splitlines(True)} for c in nb['cells']]
    text = json.dumps({**nb, 'cells': cells}, sort_keys=True, indent=1, ensure_ascii=False) + '\n'
    if text != path.read_text(encoding='utf-8'): path.write_text(text, encoding='utf-8')


# --- masthead

def badge(name, cfg):
    "The first line of page `name`."
    address = '{user}/{repo}/blob/{branch}/{nbs_path}'.format(**cfg)
    return f'{BADGE}(https://colab.research.google.com/github/{address}/{name}.ipynb)'

def colab_cell(cfg):
    "The cell that makes a page run on Colab, and does nothing elsewhere."
    wanted = f'{cfg["lib_name"]}[pages] @ git+{cfg["git_url"]}'
    return ('#| hide\nimport sys\n'
            f"if 'google.colab' in sys.modules:\n    %pip install -q \"{wanted}\"")

def masthead(args):
    "Write the address of settings.ini into every page."
    cfg = settings()
    for path in pages(args.names):
        nb = read(path)
        cells = [c for c in nb['cells'] if "'google.colab' in sys.modules" not in c['source']]
        at = next((i for i, c in enumerate(cells) if c['cell_type'] == 'markdown'), None)
        if at is None: raise SystemExit(f'{path.name}: no markdown cell to hold the title')
        first, _, rest = cells[at]['source'].partition('\n')
        if not first.startswith(BADGE): first, rest = '', '\n' + cells[at]['source']
        cells[at]['source'] = f'{badge(path.stem, cfg)}\n{rest}'
        cells.insert(at + 1, dict(cell_type='code', id='colab', metadata={}, execution_count=None, outputs=[],
                                  source=colab_cell(cfg)))
        write({**nb, 'cells': cells}, path)


# --- run

def run(args):
    "Execute pages in place; a page with a failing cell stays as it was."
    import nbformat
    from nbclient.exceptions import CellExecutionError
    from nbconvert.preprocessors import ExecutePreprocessor
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    failed = []
    for path in pages(args.names):
        executor = ExecutePreprocessor(timeout=args.timeout, coalesce_streams=True,
                                       extra_arguments=['--log-level=ERROR'])
        nb, start = nbformat.read(path, as_version=4), time.time()
        try: executor.preprocess(nb, {'metadata': {'path': str(path.parent)}})
        except CellExecutionError as e:
            failed.append(path.stem)
            print(f'{path.stem:28} FAILED\n{e}', flush=True)
            continue
        nbformat.write(nb, path)
        subprocess.run([tool('nbdev_clean'), '--fname', str(path)], cwd=ROOT, check=True)
        print(f'{path.stem:28} {time.time() - start:6.1f} s', flush=True)
    if failed: raise SystemExit(f'pages with a failing cell: {", ".join(failed)}')

def tool(name): return str(Path(sys.executable).parent/name)


# --- export

def export(args):
    "Write every module from its page; the comments behind parameters become docstrings."
    from docstrings import documented
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}       # under which nbdev exports nothing
    subprocess.run([tool('nbdev_export')], cwd=ROOT, check=True, env=env)
    for path in pages():
        sources = [c['source'] for c in read(path)['cells']]
        module = re.search(r'^#\|\s*default_exp (\S+)', '\n'.join(sources), re.M)
        if not module: continue
        title = next(s for s in sources if re.search('^# ', s, re.M) and not s.startswith('#|'))
        heading, promise = (re.search(rf'^{mark} (.+)', title, re.M)[1] for mark in '#>')
        target = ROOT/settings()['lib_path']/f'{module[1]}.py'
        text = documented(target.read_text(encoding='utf-8'), f'{heading}: {promise[0].lower()}{promise[1:]}.')
        target.write_text(text, encoding='utf-8')


# --- readme

def shown(output):
    "One stored output as markdown; pictures are for the page, not for the README."
    if output['output_type'] == 'error': raise SystemExit('the front page holds a stored error')
    data = output.get('data', {})
    if 'text/markdown' in data: return ''.join(data['text/markdown'])
    text = ''.join(output.get('text', data.get('text/plain', '')))
    return f'```text\n{text.rstrip()}\n```' if text.strip() else ''

def cell_markdown(cell):
    "One cell as markdown: `#| hide` leaves it out, `#| echo: false` leaves out its code alone."
    if cell['cell_type'] == 'markdown': return [cell['source']]
    if cell['cell_type'] != 'code' or re.search(r'^#\s*\|\s*hide\b', cell['source'], re.M): return []
    quiet = re.search(r'^#\s*\|\s*echo:\s*false', cell['source'], re.M)
    source = re.sub(r'^#\s*\|.*\n?', '', cell['source'], flags=re.M).strip()
    return ([] if quiet or not source else [f'```python\n{source}\n```']) + [shown(o) for o in cell['outputs']]

PARTS = {'Part I: the paper': (0, 11), 'Part II: the engine': (20, 39), 'Part III: experiments': (40, 49),
         'Supporting pages': (50, 99)}

def page_row(path):
    "A row of the list of pages, from what a page says of itself."
    cells = read(path)['cells']
    prose, code = ('\n'.join(c['source'] for c in cells if c['cell_type'] == kind) for kind in ('markdown', 'code'))
    title, promise = (re.search(rf'^{mark} (.+)', prose, re.M)[1].replace('|', r'\|') for mark in '#>')
    module = re.search(r'^#\|\s*default_exp (\S+)', code, re.M)
    return f'| [{path.stem[:2]} {title}]({path.name}) | {promise} | {f"`{module[1]}`" if module else ""} |'

def page_list():
    "The list of all pages, by part."
    text = '<!-- Made from the pages by `make readme`. -->\n\n# Pages\n'
    for part, (first, last) in PARTS.items():
        rows = [page_row(p) for p in pages() if p.stem[:2].isdigit() and first <= int(p.stem[:2]) <= last]
        text += f'\n## {part}\n\n' + '\n'.join(['| page | after it, you can | module |', '| --- | --- | --- |', *rows]) + '\n'
    return text

def readme(args):
    "Write README.md from the front page, its links turned to where the README lies, and the list of pages."
    cfg = settings()
    (ROOT/cfg['nbs_path']/'README.md').write_text(page_list(), encoding='utf-8')
    parts = [p.strip('\n') for c in read(ROOT/cfg['nbs_path']/cfg['readme_nb'])['cells'] for p in cell_markdown(c)]
    text = f'<!-- Made from {cfg["nbs_path"]}/{cfg["readme_nb"]} by `make readme`: edit the page, not this. -->\n\n'
    text += '\n\n'.join(p for p in parts if p) + '\n'
    text = re.sub(r'\]\((?=[\w-]+\.ipynb|README\.md)', f']({cfg["nbs_path"]}/', text).replace('](../', '](')
    (ROOT/'README.md').write_text(text, encoding='utf-8')


# --- check

def faults(path):
    "What this page may not be committed with."
    nb = read(path)
    code = [c for c in nb['cells'] if c['cell_type'] == 'code' and c['source'].strip()]
    outputs = [o for c in code for o in c['outputs']]
    text = '\n'.join(''.join(t) for o in outputs for t in [o.get('text', ''), *(
        v for kind, v in o.get('data', {}).items() if kind.startswith('text/') and isinstance(v, (str, list)))])
    if code and not outputs: yield 'no stored output: run it with `make notebooks` and keep what it shows'
    if any(o['output_type'] == 'error' for o in outputs): yield 'a cell ends in a stored error'
    if any(SKIPPED.search(c['source']) for c in nb['cells']): yield 'a cell is kept from the tests'
    title = next(c['source'] for c in nb['cells'] if c['cell_type'] == 'markdown')
    if re.search(r'^[-*] ', title, re.M):
        yield 'a list in the title cell, which nbdev takes for settings: give it its own'
    if any(c['cell_type'] == 'raw' for c in nb['cells']): yield 'a raw cell, which could switch the tests off'
    if found := MACHINE_PATH.search(text):
        yield f"an output names a machine's path: {text[max(found.start() - 40, 0):found.end() + 30]!r}"

def changes(old, new, folders=('nbs', 'annotated_transformer', 'README.md')):
    "Unified diffs of every file in `folders` that differs between the trees `old` and `new`."
    def files(root): return {p.relative_to(root) for f in folders for p in [root/f, *(root/f).rglob('*')]
                             if p.suffix in ('.py', '.ipynb', '.md') and '.ipynb_checkpoints' not in p.parts}
    def lines(path): return path.read_text(encoding='utf-8').splitlines() if path.exists() else []
    for f in sorted(files(old) | files(new)):
        yield from difflib.unified_diff(lines(old/f), lines(new/f), f'committed/{f}', f'made again/{f}', 'as it is',
                                        'as it should be', n=1, lineterm='')

def check(args):
    "In a copy of the tree, so that nothing here changes."
    here = pages()
    wrong = [f'{p.name}: {fault}' for p in here for fault in faults(p)]
    total = sum(p.stat().st_size for p in here)
    if total > MAX_BYTES: wrong.append(f'the pages hold {total/1e6:.1f} MB, over {MAX_BYTES/1e6:.0f}')
    with tempfile.TemporaryDirectory() as d:
        copy = Path(d)/'copy'
        shutil.copytree(ROOT, copy, ignore=LEFT_ALONE)
        for module in (copy/settings()['lib_path']).rglob('*.py'):      # a module without a page does not come back
            if '# AUTOGENERATED' in module.read_text(encoding='utf-8')[:500]: module.unlink()
        for command in ([sys.executable, 'tools/pages.py', 'masthead'], [sys.executable, 'tools/pages.py', 'export'],
                        [tool('nbdev_clean')], [sys.executable, 'tools/pages.py', 'readme']):
            subprocess.run(command, cwd=copy, check=True)
        diff = list(changes(ROOT, copy))
    if diff:
        wrong.append('masthead, export, clean and readme would change files: '
                     'run `make masthead export readme` and commit what changes')
        print('\n'.join(line[:200] for line in diff[:200]))
        if len(diff) > 200: print(f'… and {len(diff) - 200} more lines')
    if wrong: raise SystemExit('\n'.join(wrong))
    print(f'{len(here)} pages, {total/1e6:.1f} MB: in step with the modules, the README and settings.ini')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar='COMMAND')
    for job in masthead, run, export, readme, check:
        sub = commands.add_parser(job.__name__, help=job.__doc__)
        sub.set_defaults(job=job)
        if job in (masthead, run): sub.add_argument('names', nargs='*', metavar='NAME', help='pages; all by default')
        if job is run: sub.add_argument('--timeout', type=int, default=600, help='seconds that one cell may take')
    args = parser.parse_args()
    args.job(args)

if __name__ == '__main__': main()
