"""Build the website into site/build/html from the notebooks as they are stored: `make site`.

Needs the packages of requirements.txt, Node.js, and the files of package.json in build/node_modules.
"""
import html
import json
import re
import shutil
import subprocess
import sys
import time
from urllib.parse import urlencode

import records
from notebooks import convert
from project import BY_NUMBER, CFG, GROUPS, NBS, PAGES, ROOT, SITE, read_page, repository_links
from reference import Reference

BUILD = SITE / 'build'
SOURCE = BUILD / 'src'
VENDOR = BUILD / 'vendor'
HTML = BUILD / 'html'
MODULES = BUILD / 'node_modules'
EXPLAINER = SITE / 'explainer' / 'build.py'
# What the live explainer shows on the pages of Part I and on page 39: the view, its state (main.js), the link's words.
VIEWS = {
    0: ({'view': 'tour'}, 'watch a sentence become German'),
    1: ({'view': 'attention'}, 'queries, keys, values and weights of every head'),
    2: ({'view': 'positions'}, 'take the positions away'),
    3: ({'view': 'model'}, 'the numbers inside every sublayer'),
    4: ({'view': 'model'}, 'the numbers inside every box'),
    5: ({'view': 'attention', 'box': 'encoder.1.self', 'source': 8,
         'text': 'The dog sleeps in the house because it is tired.'},
        'one layer connects distant words'),
    6: ({'view': 'tokens', 'box': 'encoder.embedding', 'text': 'The elephant sleeps.'},
        'from text to tokens, ids and vectors'),
    7: ({'view': 'predictions', 'box': 'decoder.softmax', 'cursor': 3},
        'what the model predicts after each prefix, and after a token that you force'),
    8: ({'view': 'decoding', 'method': 'beam'}, 'greedy decoding, the beam, and sampling'),
    9: ({'view': 'comparison', 'positions': 0}, 'damage the model, and compare its translation with the original'),
    10: ({'view': 'translator'}, 'translate your own sentences'),
    11: ({'view': 'attention', 'box': 'decoder.1.cross'}, 'every map, head by head'),
    39: ({'view': 'attention', 'box': 'decoder.1.cross', 'text': 'The dog sees the cat because it is tired.'},
         'the attention of the included model, to choose heads and tokens in'),
}


def vendor():
    "The style sheet and fonts of formulas, and the typefaces, from npm packages, with their licences."
    shutil.rmtree(VENDOR, ignore_errors=True)
    fonts = VENDOR / 'fonts'
    fonts.mkdir(parents=True)
    katex = VENDOR / 'katex'
    (katex / 'fonts').mkdir(parents=True)
    for path in (MODULES / 'katex/dist/fonts').glob('*.woff2'):
        shutil.copy(path, katex / 'fonts')
    css = (MODULES / 'katex/dist/katex.min.css').read_text(encoding='utf-8')
    css = re.sub(r',url\([^)]*\.(?:woff|ttf)\) format\("[^"]*"\)', '', css)
    (katex / 'katex.min.css').write_text(css, encoding='utf-8')
    shutil.copy(MODULES / 'katex/LICENSE', katex)
    for family in ('source-sans-3', 'source-serif-4'):
        package = MODULES / '@fontsource-variable' / family
        for style in ('normal', 'italic'):
            shutil.copy(package / f'files/{family}-latin-wght-{style}.woff2', fonts / f'{family}-{style}.woff2')
        shutil.copy(package / 'LICENSE', fonts / f'{family}-LICENSE')


def glossary():
    "The terms with their forms and definitions, and the page that lists them."
    terms = {}
    text = ''
    for block in (SITE / 'content/glossary.md').read_text(encoding='utf-8').split('\n\n'):
        match = re.fullmatch(r'([^(\n#]+?)(?: \((.*)\))?\n: (.+)', block.strip(), re.S)
        if not match:
            text += block + '\n\n'
            continue
        term, forms, definition = match.groups()
        forms = [term] if forms is None else [form.strip() for form in forms.split(',') if form.strip()]
        terms[term] = {'forms': [form.lower() for form in forms], 'definition': definition}

        def page_link(found):
            page = BY_NUMBER[int(found[1])]
            return f' ([page\u00a0{page["number"]:02}]({found[2]}))'
        definition = re.sub(r' \[(\d\d)\]\(([^)]+)\)', page_link, definition)
        text += f'```{{glossary}}\n{term}\n  {definition}\n```\n\n'
    return terms, text


def definitions(terms):
    "Definitions as plain text, by the address of the term."
    found = {}
    for term, entry in terms.items():
        text = re.sub(r'\s*\[\d\d\]\([^)]*\)', '', entry['definition'])
        text = re.sub(r'[`*]', '', text)
        found[re.sub(r'[^\w.]+', '-', term).strip('-')] = html.escape(text, quote=True)
    return found


def moved():
    "From page numbers and names of version 0.1.0 to those of today: the tables of CHANGELOG.md."
    changes = (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8')
    pages = re.search(r'### Where pages went\n\n(.*?)\n\n', changes, re.S)[1]
    names = re.search(r'### Where names went\n\n(.*?)\n\n', changes, re.S)[1]

    def link(match):
        page = BY_NUMBER.get(int(match[0]))
        return f'[{match[0]}]({page["stem"]}.ipynb)' if page else match[0]
    rows = pages.splitlines()
    for i, row in enumerate(rows[2:], 2):
        _, old, new, _ = row.split('|')
        rows[i] = f'|{old}|' + re.sub(r'\b\d\d\b', link, new) + '|'
    return ('# Where pages and names went\n\nVersion 0.2.0 has new page numbers and some new names.\n\n## Pages\n\n'
            + '\n'.join(rows) + '\n\n## Names\n\n' + names + '\n')


def front_page():
    "What the landing page takes from nbs/index.ipynb: the example with its output, the results and their caption."
    cells = read_page(NBS / 'index.ipynb')['cells']
    example = next(cell for cell in cells if 'Translator.load()' in cell['source'])
    output = ''.join(example['outputs'][0]['data']['text/plain'])
    tables = [''.join(output['data']['text/markdown']) for cell in cells for output in cell.get('outputs', [])
              if 'text/markdown' in output.get('data', {})]
    results = next(text for text in tables if '| BLEU |' in text)
    rows = '\n'.join(line for line in results.splitlines() if line.startswith('|'))
    rows = re.sub(r'(±|\(\d) ', '\\1\u00a0', rows)                 # a number stays beside its sign and its unit
    heading = '## Results\n\n'
    caption = next(cell['source'].split(heading)[1] for cell in cells if heading in cell['source'])
    return {'example': example['source'], 'output': output, 'results': repository_links(rows),
            'caption': repository_links(caption)}


def contents():
    "A list of all pages, with what the reader can do after each."
    text = '# All pages\n\nAfter each page, you can do what stands beside it.\n'
    for title in GROUPS:
        text += f'\n## {title}\n\n'
        for page in PAGES.values():
            if page['group'] == title:
                text += f'- [{page["number"]:02} {page["title"]}]({page["stem"]}.ipynb): {page["promise"]}\n'
    return text


def toctrees():
    "The left navigation."
    def tree(caption, entries):
        return f'\n```{{toctree}}\n:hidden:\n:caption: "{caption}"\n\n' + '\n'.join(entries) + '\n```\n'
    text = tree('Start', ['Prerequisites and notation <notation>', 'All pages <contents>', 'glossary', 'results'])
    for title in GROUPS:
        entries = [f'{page["number"]:02} {page["title"]} <{stem}>'.replace('`', '')
                   for stem, page in PAGES.items() if page['group'] == title]
        text += tree(title, entries)
    return text + tree('Reference', ['Python reference <api/index>', 'Where pages went <moved>'])


def live_view(page):
    "Address and words of the view of the live explainer that belongs to a page; None where there is none."
    if page['number'] not in VIEWS or not EXPLAINER.exists():
        return None
    state, words = VIEWS[page['number']]
    return f'explainer/index.html#{urlencode(state)}', words


def make_explainer():
    "The live explainer as one file, whose links lead to the pages of this site."
    folder = HTML / 'explainer'
    folder.mkdir()
    subprocess.run([sys.executable, EXPLAINER, folder / 'index.html', '--pages', '../{page}.html'], check=True)


def filled(name, values):
    "A page of content/, its {{names}} replaced."
    text = (SITE / 'content' / name).read_text(encoding='utf-8')
    return re.sub(r'\{\{(\w+)\}\}', lambda match: str(values[match[1]]), text)


def write_sources():
    "Everything that Sphinx reads, in build/src."
    shutil.rmtree(SOURCE, ignore_errors=True)
    (SOURCE / 'api').mkdir(parents=True)
    reference = Reference()
    reference.write(SOURCE / 'api')
    terms, glossary_page = glossary()
    names = {stem: convert(stem, SOURCE, reference, terms, live_view(page)) for stem, page in PAGES.items()}
    front = front_page()
    picture = (SITE / 'images/attention.svg').read_text(encoding='utf-8')
    live = (SITE / 'content' / ('live.html' if EXPLAINER.exists() else 'picture.html')).read_text(encoding='utf-8')
    values = CFG | front | {'live': live.replace('{{picture}}', picture), 'toctrees': toctrees(), 'pages': len(PAGES)}
    texts = {'index.md': filled('index.md', values), 'notation.md': filled('notation.md', values),
             'contents.md': contents(), 'glossary.md': glossary_page, 'moved.md': moved(),
             'results.md': records.page(front['results'], front['caption'])}
    for name, text in texts.items():
        (SOURCE / name).write_text(text, encoding='utf-8')
    settings = CFG | {'names': names, 'definitions': definitions(terms), 'footer': filled('footer.html', values),
                      'promises': {stem: html.escape(page['promise'], quote=True) for stem, page in PAGES.items()}}
    details = [page for page in PAGES.values() if page['group'].startswith(('Details', 'Appendix'))]
    settings['details'] = [name for page in details for name in (page['stem'], f"api/{page['module']}")]
    settings['description'] = html.escape(settings['description'], quote=True)
    (SOURCE / 'site.json').write_text(json.dumps(settings), encoding='utf-8')


def finish():
    """Leave out what no page needs: icons as a script (their fonts are there), the search index outside the search.

    Correct what a screen reader would read: folds and the search button are named by their text.
    """
    icons = r'<script[^>]*/fontawesome\.js[^>]*></script>'
    hurried = r'<link rel="preload" as="script"[^>]*>\s*'     # the scripts can wait; the style sheet cannot
    index = r'<script src="[^"]*(?:searchindex|language_data|searchtools)\.js[^>]*></script>\s*'
    for path in HTML.rglob('*.html'):
        if '_static' in path.parts:
            path.unlink()
            continue
        text = path.read_text(encoding='utf-8')
        text = re.sub(f'{icons}|{hurried}', '', text)
        text = text.replace('<summary aria-label="Toggle hidden content">', '<summary>')
        text = re.sub(r'(<details[^>]*><summary)(><span)', r'\1 aria-label="Modules"\2', text)
        text = re.sub(r'(search-button-field[^>]*?) aria-label="Search"', r'\1', text)
        if path.name != 'search.html':
            text = re.sub(index, '', text)
        path.write_text(text, encoding='utf-8')
    # The theme measures all boxes of a page when it is loaded, with a new layout for each. site.js does it instead.
    script = HTML / '_static/scripts/pydata-sphinx-theme.js'
    text = script.read_text(encoding='utf-8')
    start = re.compile(r',"complete"===document\.readyState\?(\w+)\(\):window\.addEventListener\("load",\1\)')
    if len(start.findall(text)) != 1:
        sys.exit(f'{script.name} starts its functions in another way than expected: adapt finish()')
    script.write_text(start.sub('', text), encoding='utf-8')
    for pattern in ('_static/scripts/fontawesome.js*', '_static/scripts/*.map', '_static/styles/*.map', '.buildinfo*'):
        for path in HTML.glob(pattern):
            path.unlink()


def main():
    from lighten import lighten # here, since tests import this file without the packages of the site

    start = time.time()

    def report(what):
        print(f'{time.time() - start:6.1f} s  {what}', flush=True)
    vendor()
    write_sources()
    report('sources written')
    shutil.rmtree(HTML, ignore_errors=True)
    subprocess.run([sys.executable, '-m', 'sphinx', '-b', 'html', '-q', '-W', '--keep-going', '-c', SITE,
                    '-d', BUILD / 'doctrees', SOURCE, HTML], check=True)
    report('pages made')
    finish()
    lighten(HTML)
    report('pages made light')
    if EXPLAINER.exists():
        make_explainer()
    subprocess.run([sys.executable, '-m', 'pagefind', '--site', HTML, '--quiet', '--root-selector', 'article',
                    '--exclude-selectors', 'a.headerlink, .prev-next-area, p.page-facts, .katex-mathml'], check=True)
    (HTML / '.nojekyll').write_text('')
    size = sum(path.stat().st_size for path in HTML.rglob('*') if path.is_file())
    report(f'{len(list(HTML.rglob("*.html")))} pages, {size / 1e6:.1f} MB in {HTML.relative_to(ROOT)}')


if __name__ == '__main__':
    main()
