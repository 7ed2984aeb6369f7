"""The website. Without a build: how pages are converted, and what the glossary and the reference need. With a build in
site/build/html (`make site`): links, folds and search, in a real browser. All of it: `make test-site`.
"""
import functools
import gzip
import http.server
import json
import re
import statistics
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
SITE = ROOT / 'site' / 'build' / 'html'
AXE = ROOT / 'site' / 'build' / 'node_modules' / 'axe-core' / 'axe.min.js'
PICTURES = ROOT / 'runs' / 'site'           # screenshots to look at
MAX_PAGE_BYTES = 1_500_000                  # compressed, from an empty cache
SHOWN = ['index', '01_attention', '07_training', '10_english_to_german', 'results']
PHONE = {'viewport': {'width': 390, 'height': 844}, 'color_scheme': 'dark'}
DESK = {'viewport': {'width': 1400, 'height': 1000}, 'color_scheme': 'light'}

sys.path.insert(0, str(ROOT / 'site'))
import build
import notebooks
import project
import records
from reference import Reference

built = pytest.mark.site                    # needs a build; `make test` leaves it out


# --- without a build

@pytest.fixture(scope='module')
def reference():
    return Reference()


def converted(stem, tmp_path, reference):
    terms, _ = build.glossary()
    names = notebooks.convert(stem, tmp_path, reference, terms)
    return nbformat.read(tmp_path / f'{stem}.ipynb', 4).cells, names


def test_a_page_is_converted(tmp_path, reference):
    cells, names = converted('01_attention', tmp_path, reference)
    code = [cell for cell in cells if cell.cell_type == 'code']
    text = '\n'.join(cell.source for cell in cells)
    assert not re.search(r'^#\|', text, re.M) and 'google.colab' not in text and 'check_1(extremes,' not in text
    solutions = [cell for cell in code if 'solution' in cell.metadata.get('tags', [])]
    assert len(solutions) == 3
    for cell in solutions:
        assert set(cell.metadata.tags) & {'hide-cell', 'hide-input'}
        assert cell.metadata.mystnb.code_prompt_show == 'Show the solution'
    pictures = [cell for cell in code if any('image/png' in output.get('data', {}) for output in cell.outputs)]
    assert len(pictures) == 8
    assert all(len(cell.metadata.mystnb.image.alt) > 10 for cell in pictures)
    assert 'id="def-MultiHeadAttention" href="api/attention.html#annotated_transformer.attention.MultiHeadAttention"' in text
    assert 'about ' in text and 'colab.research.google.com' in text and '/edit/' in text
    assert names['heatmap'] == 'api/plotting.html#annotated_transformer.plotting.heatmap'


def test_stored_outputs_are_kept(tmp_path, reference):
    "Nothing is executed: what a page shows is what its notebook stores."
    stored = nbformat.read(project.NBS / '09_evaluation.ipynb', 4).cells
    cells, _ = converted('09_evaluation', tmp_path, reference)
    printed = [output.text for cell in cells if cell.cell_type == 'code' for output in cell.outputs
               if output.output_type == 'stream']
    expected = [output.text for cell in stored if cell.cell_type == 'code' and '#| hide\n' not in cell.source
                for output in cell.outputs if output.output_type == 'stream']
    assert printed == expected and len(printed) > 5


def test_prose_is_linked_once_and_not_in_code():
    class Names:
        def target(self, code):
            return {'beam_search': 'annotated_transformer.decoding.beam_search'}.get(code)
    names = Names()
    terms = {'beam search': {'forms': ['beam search'], 'definition': 'x'}, 'mask': {'forms': ['mask'], 'definition': 'x'}}
    text = '# Beam search\n\nA **mask** hides. Beam search is beam search, see `beam_search` and `beam_search`.'
    linked = notebooks.Prose(text, names, terms).linked(text)
    assert linked == ('# Beam search\n\nA **mask** hides. {term}`Beam search <beam search>` is beam search, see '
                      '{py:obj}`beam_search <annotated_transformer.decoding.beam_search>` and `beam_search`.')
    plain = '`beam search` $beam search$ [beam search](x.md) ```\nbeam search\n```'
    assert notebooks.Prose(plain, names, terms).linked(plain) == plain


@pytest.mark.parametrize('stem, code, target', [
    ('29_translator', 'Translator.load(folder)', 'translator.Translator.load'),
    ('29_translator', 'translate(text)', 'translator.Translator.translate'),        # a method of the page's class
    ('29_translator', 'score(text, translation)', 'translator.ScoringModel.score'),   # not scoring.score
    ('00_tour', 'translator.attention', 'translator.Translator.attention'),
    ('24_kernels', 'accelerate(model)', 'kernels.accelerate'),
    ('29_translator', 'explore(text)', 'translator.Translator.explore'),
    ('28_inference', 'decoding.beam_search', 'decoding.beam_search'),
    ('01_attention', 'attention', 'attention.attention'),
    ('23_large_corpora', 'prepare', 'large_corpora.prepare'),
    ('91_files', 'recover', 'files.recover'),
    ('10_english_to_german', 'train', None),                                        # the command
    ('62_model_commands', 'serve', None),
    ('03_layers', 'norm(x)', None), ('21_vocabulary', 'chr(byte)', None), ('26_checkpoints', 'config.json', None),
    ('24_kernels', 'nn.Dropout', None), ('27_many_machines', 'len(loader)', None)])
def test_calls_and_dotted_names_are_linked(reference, stem, code, target):
    page = project.PAGES[stem]
    cells = nbformat.read(project.NBS / f'{stem}.ipynb', 4).cells
    names = notebooks.Names(notebooks.code_names(cells, page['module'], reference), reference, page['module'])
    assert names.target(code) == (target and f'annotated_transformer.{target}')
    linked = notebooks.Prose('', names, {}).linked(f'See `{code}` here.')
    assert ('{py:obj}' in linked) == bool(target) and f'`{code}' in linked


def test_the_reference_leads_to_the_cell_that_defines_a_name(reference):
    assert '<../08_decoding.html#def-beam_search>' in reference.module_page('decoding')


def test_links_out_of_the_pages_lead_to_the_repository():
    text = project.repository_links('[a](../LICENSE) [b](01_attention.ipynb#Why-divide?) [c](index.ipynb)')
    assert text == f"[a]({project.CFG['blob']}/LICENSE) [b](01_attention.ipynb#why-divide) [c](index.md)"


def test_every_page_is_in_the_navigation():
    assert {stem for stem in project.PAGES} == {path.stem for path in project.NBS.glob('[0-9]*.ipynb')}
    assert all(re.search(rf'<{stem}>$', build.toctrees(), re.M) for stem in project.PAGES)


def test_glossary_leads_to_pages_that_use_the_term():
    terms, page = build.glossary()
    assert len(terms) >= 60
    for term, entry in terms.items():
        (target,) = re.findall(r'\]\((\w+)\.ipynb\)', entry['definition'])
        text = (project.NBS / f'{target}.ipynb').read_text(encoding='utf-8').lower()
        assert any(form in text for form in entry['forms'] or [term.lower()]), f'{term} is not on page {target}'
        assert f'```{{glossary}}\n{term}\n' in page


def test_reference_has_every_public_name_with_its_parameters(reference, tmp_path):
    assert sum(map(len, reference.modules.values())) > 800
    text = reference.module_page('decoding')
    assert ".. py:function:: beam_search(model: nn.Module, src: Int[Tensor, '1 n'], beam_size: int=4" in text
    assert ':param length_penalty: alpha in section 6.1, at least 0' in text
    assert '/annotated_transformer/decoding.py#L' in text
    assert 'Page 08, Decoding' in text
    assert '.. py:class:: Hypothesis(ids: list[int], log_prob: float, normalized_score: float)' in text


def test_results_are_those_of_the_records():
    front = build.front_page()
    page = records.page(front['results'], front['caption'])
    found = records.load()
    discussed = records.pages_of(found)
    for name, record in found.items():
        assert f'>{name}</a>' in page
        parts = list(records.sources(name, record))
        assert all(records.main_figures(name, record, source['part']) for source in parts), f'no figure of {name}'
        if '"seed' in json.dumps(record):
            assert all(source['seeds'] for source in parts), f'no seed of {name}'
        assert discussed[name] or name == 'site', f'no page of {name}'
    table = page.split('## All records')[1]
    mbr = found['mbr']['test']['BLEU']['bleu']
    assert f'minimum Bayes risk with BLEU: BLEU {mbr:.2f}' in table and '20 kills' in table
    assert table.count('class="figures"') >= len(found)
    # Each plot shows what its title says: all scores on cased text but the toy language's, all on tokenized text.
    plots = re.findall(r'<figcaption>(.*?)</figcaption>.*?</figure>', page)
    circles = [part.count('class="dot"') for part in page.split('<figcaption>')[1:]]
    n_cased = sum(split != 'val' and 'bleu' in scores for name, record in found.items() if not name.startswith('toy')
                  for split, scores in record.get('scores', {}).items())
    n_tokenized = sum(split != 'val' and 'bleu' not in scores for record in found.values()
                      for split, scores in record.get('scores', {}).items())
    assert len(plots) == 6 and circles[:2] == [n_cased, n_tokenized]
    assert 'cased' in plots[0] and 'tokenized' in plots[1]
    for name, record in found.items():
        for source in records.sources(name, record):
            assert source['machine'] and source['date'] and len(source['weights'] or source['file']) == 64
    scores = records.load()['multi30k-en-fr']['scores']['test_2016_flickr']
    assert f"{scores['bleu']:.2f} ± {scores['bleu_half_width']:.2f}" in page
    scores = records.load()['gpu-tok-r-drop-seed1']['scores']['test']
    (row,) = [row for row in page.split('<tr>') if '>gpu-tok-r-drop-seed1</a>' in row and '<small>lower case' in row]
    assert f"{scores['lowercased_tokenized_bleu']:.2f} ± " in row and f"<td>{scores['lowercased_tokenized_chrf']:.2f}</td>" in row
    speed = records.load()['train-speed-0.1.0']['metrics']['tiny']
    tokens, rounds = speed['tokens_per_second']['annotated_transformer'], speed['rounds']['annotated_transformer']
    slowest, fastest = (tokens * statistics.median(rounds) / seconds for seconds in (max(rounds), min(rounds)))
    assert f'{tokens:,} ({slowest:,.0f} to {fastest:,.0f})' in page
    speed = records.load()['train-speed-cpu']['metrics']['small']
    beside = f"{speed['speedup_of_medians']:.2f} ({speed['speedup_of_best']:.2f})"
    assert f'<td data-sort="{speed["speedup_of_medians"]}">{beside}</td>' in page


def test_results_show_decoding_of_every_model_with_latencies():
    found = records.load()
    text = records.decoding_speed(found)
    rows = text.split('<tr>')[2:]
    names = [name for name in found if name.startswith('decode-speed')]
    sizes = {name: found[name]['settings']['size'] or 'toy' for name in names}
    assert len(rows) == sum(len(found[name]['metrics']) for name in names) and {'toy', 'tiny'} <= set(sizes.values())
    for name, size in sizes.items():
        of_record = [row for row in rows if f'>{name}</a>' in row]
        assert len(of_record) == len(found[name]['metrics']) and all(row.startswith(f'<td>{size}</td>') for row in of_record)
        for row, measured in zip(of_record, found[name]['metrics']):
            if measured['batch'] == 1:
                assert f"{measured['latency_ms']['median']:.1f} ({measured['latency_ms']['95 %']:.1f})</td>" in row


def test_the_main_rows_say_what_plus_minus_means():
    "On the results page and on the landing page: what README says. One row uses R-Drop, and ± is not a standard deviation."
    front = build.front_page()
    assert 'half of a 95% interval: over *seeds*, of the mean; over *sentences*, of one model' in front['caption'].replace('\n', ' ')
    assert '##' not in front['caption'] and len(re.findall(r'^\|', front['results'], re.M)) == 2 + 5
    landing = (project.SITE / 'content/index.md').read_text(encoding='utf-8')
    assert '{{results}}\n\n{{caption}}' in landing
    results = records.page(front['results'], front['caption'])
    assert f"{front['caption']}\n\n{front['results']}" in results
    for text in (landing, results.split('## Translation quality')[0]):
        assert not re.search('standard deviation|plain model|95 %', text, re.I)


def test_pages_wait_for_no_script(tmp_path, monkeypatch):
    "The theme's scripts are not fetched before the style sheet, and do not lay the page out box by box."
    monkeypatch.setattr(build, 'HTML', tmp_path)
    script = tmp_path / '_static/scripts/pydata-sphinx-theme.js'
    script.parent.mkdir(parents=True)
    script.write_text('e(()=>{f()}),"complete"===document.readyState?I():window.addEventListener("load",I)})();')
    page = tmp_path / '01_attention.html'
    page.write_text('<link rel="stylesheet" href="a.css">\n<link rel="preload" as="script" href="b.js" />\n<script defer src="b.js">')
    build.finish()
    assert script.read_text() == 'e(()=>{f()})})();'
    assert page.read_text() == '<link rel="stylesheet" href="a.css">\n<script defer src="b.js">'
    with pytest.raises(SystemExit, match='in another way'):     # a theme that has changed
        build.finish()


def test_old_page_numbers_lead_to_pages():
    page = build.moved()
    assert page.count('.ipynb)') > 30 and '| `memory` | `encoder_output` |' in page


# --- the built site, read

class Page(HTMLParser):
    "Addresses, ids, headings, pictures and folds of one page."
    def __init__(self, path):
        super().__init__()
        self.links = []
        self.loads = []
        self.ids = set()
        self.images = []
        self.n_titles = 0
        self.folds = []
        text = path.read_text(encoding='utf-8')
        self.text = text
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if 'id' in attrs:
            self.ids.add(attrs['id'])
        if tag == 'a' and 'href' in attrs:
            self.links.append(attrs['href'])
        if 'src' in attrs:
            self.loads.append(attrs['src'])
        if tag == 'link' and attrs.get('rel') not in ('canonical', 'author'):
            self.loads.append(attrs['href'])
        if tag == 'img':
            self.images.append(attrs.get('alt', ''))
        if tag == 'article':
            self.n_titles = 0           # what stands before is for print
        if tag == 'h1':
            self.n_titles += 1
        if tag == 'details':
            self.folds.append('open' in attrs)


@pytest.fixture(scope='module')
def site():
    if not SITE.exists():
        pytest.fail('no site: run `make site`')
    return {path.relative_to(SITE).as_posix(): Page(path) for path in sorted(SITE.rglob('*.html'))
            if not {'_static', 'explainer', 'pagefind'} & set(path.relative_to(SITE).parts)}


@built
def test_every_link_and_anchor_resolves(site):
    n_links = 0
    wrong = []
    for name, page in site.items():
        for link in page.links + page.loads:
            if urlparse(link).scheme or link.startswith('//'):
                if link in page.loads and not link.startswith('data:'):
                    wrong.append(f'{name} loads {link}')
                continue
            n_links += 1
            target, anchor = urldefrag(urljoin(f'/{name}', link))
            target = unquote(urlparse(target).path).lstrip('/') or 'index.html'
            if not (SITE / target).exists():
                wrong.append(f'{name}: no {link}')
            elif anchor and target in site and unquote(anchor) not in site[target].ids:
                wrong.append(f'{name}: no anchor {link}')
    assert not wrong, '\n'.join(wrong[:40])
    assert n_links > 10_000 and len(site) > 120


@built
def test_pages_hold_what_they_should(site):
    for name, page in site.items():
        if name.startswith('search') or name == 'genindex.html':
            continue
        assert page.n_titles == 1, f'{name} has {page.n_titles} titles'
        assert all(page.images), f'{name} has a picture without a text'
        assert 'katex-error' not in page.text and '<Figure size' not in page.text
        assert not re.search(r'\{(?:term|py:obj)\}', page.text), name
        assert '<meta name="description"' in page.text
    for number in range(12):
        (page,) = [page for name, page in site.items() if name.startswith(f'{number:02}_')]
        assert page.text.count('Show the solution') >= 1
        assert not any(page.folds), 'a fold is open'
        assert 'class="term"' in page.text and 'class="code-link"' in page.text


@built
def test_it_works_on_pages_beside_each_other():
    "What GitHub Pages needs, and what it must not leave out."
    assert (SITE / '.nojekyll').exists()
    assert (SITE / '_static/katex/fonts').is_dir() and (SITE / 'pagefind/pagefind.js').exists()
    for licence in ('katex/LICENSE', 'fonts/source-sans-3-LICENSE', 'fonts/source-serif-4-LICENSE'):
        assert (SITE / '_static' / licence).exists()


# --- the built site, in a browser

class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope='module')
def address():
    "The site below a folder, as on GitHub Pages."
    handler = functools.partial(Quiet, directory=SITE.parent)
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/{SITE.name}/'
    server.shutdown()


@pytest.fixture
def visit(chromium, address):
    "Opens a page. At the end, nothing may have been asked of another server, missing, or reported on the console."
    contexts = []
    faults = []

    def open_page(name, **how):
        context = chromium.new_context(**(DESK | how))
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on('request', lambda request: request.url.startswith((address, 'data:', 'blob:'))
                or faults.append(f'{name} asks for {request.url}'))
        page.on('response', lambda response: response.status < 400 or faults.append(f'{response.status} {response.url}'))
        page.on('console', lambda message: message.type in ('error', 'warning')
                and faults.append(f'{name} reports {message.text}'))
        page.on('pageerror', lambda error: faults.append(f'{name} fails: {error}'))
        page.goto(f'{address}{name}.html')
        contexts.append(context)
        return page
    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def names_of_pages():
    return [path.relative_to(SITE).with_suffix('').as_posix() for path in sorted(SITE.rglob('*.html'))
            if not {'_static', 'explainer', 'pagefind'} & set(path.relative_to(SITE).parts)] if SITE.exists() else []


@built
@pytest.mark.parametrize('how', [PHONE, DESK], ids=['phone, dark', 'desk, light'])
def test_every_page_fits_its_screen(visit, address, how):
    page = visit('index', **how)
    wrong = []
    for name in names_of_pages():
        page.goto(f'{address}{name}.html')
        too_wide = page.evaluate('document.documentElement.scrollWidth - innerWidth')
        if too_wide > 1:
            wrong.append(f'{name} is {too_wide} pixels too wide')
        assert page.evaluate('document.documentElement.dataset.theme') == how['color_scheme']
    assert not wrong


@built
@pytest.mark.parametrize('words, target, heading', [
    ('label smoothing', '07_training.html', 'Training'), ('beam search', '08_decoding.html', 'Decoding'),
    ('MultiHeadAttention', '01_attention.html', 'Attention'),
    ('MultiHeadAttention', 'api/attention.html', 'Module attention'),
    ('masks', '01_attention.html', 'Attention'), ('train own tsv', '34_your_own_data.html', 'Your own data')])
def test_search_finds(visit, words, target, heading):
    page = visit('21_vocabulary')
    page.keyboard.press('Control+k')
    page.locator('#find input').fill(words)
    page.wait_for_selector('#find a.pagefind-ui__result-link')
    page.wait_for_timeout(800)
    found = page.locator('#find a.pagefind-ui__result-link').evaluate_all('links => links.map(a => a.href)')
    pages = list(dict.fromkeys(urlparse(link).path.split('/html/')[1] for link in found))
    assert target in pages[:4], pages
    page.locator(f'#find a.pagefind-ui__result-link[href*="{target}"]').first.click()
    page.wait_for_url(f'**/{target}*')
    assert page.locator('h1').first.inner_text().startswith(heading)


@built
def test_search_works_from_a_folder(chromium):
    "Without a server, Sphinx's own index answers."
    page = chromium.new_context(offline=True).new_page()
    page.goto(f'{(SITE / "search.html").as_uri()}?q=label+smoothing')
    page.wait_for_selector('#search-results li a')
    page.wait_for_timeout(1500)
    assert any('Training' in text for text in page.locator('#search-results li a').all_inner_texts()[:5])
    page.goto((SITE / '01_attention.html').as_uri())
    assert page.locator('.katex').first.is_visible()
    assert page.evaluate("document.fonts.load('16px KaTeX_Math').then(fonts => fonts.length)") == 1
    page.context.close()


@built
def test_solutions_are_folded_and_open(visit):
    page = visit('01_attention')
    solution = page.locator('.tag_solution pre').first
    assert not solution.is_visible()
    page.locator('.tag_solution summary').first.click()
    solution.wait_for(state='visible')
    assert 'def extremes' in solution.inner_text()


@built
def test_the_keyboard_reaches_what_scrolls(visit):
    "Boxes are measured when Tab is pressed, not when the page is loaded: that took a phone a second."
    page = visit('01_attention', **PHONE)
    page.wait_for_load_state('networkidle')
    page.wait_for_timeout(500)
    reachable = '.bd-article :is(pre, .cell_output, .cell_output .output, .pst-scrollable-table-container, div.math)[tabindex="0"]'
    assert page.locator(reachable).count() == 0
    page.keyboard.press('Tab')
    wide = page.evaluate("""() => [...document.querySelectorAll('.bd-article pre, .bd-article .cell_output, .bd-article div.math')]
        .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.tabIndex)""")
    assert len(wide) > 10 and set(wide) == {0}


@built
def test_copy_buttons_copy(visit):
    page = visit('01_attention', permissions=['clipboard-read', 'clipboard-write'])
    box = page.locator('div.cell_input:visible').first
    box.hover()
    box.locator('button.copybtn').click()
    page.wait_for_timeout(200)
    assert page.evaluate('navigator.clipboard.readText()').strip() == box.locator('pre').inner_text().strip()


@built
def test_dark_mode(visit):
    "The button changes the page and its plots, whose ground is transparent, and the choice is kept."
    page = visit('01_attention')
    colours = '''() => [getComputedStyle(document.body).backgroundColor,
                       getComputedStyle(document.querySelector('.cell_output img')).backgroundColor]'''
    light = page.evaluate(colours)
    plot = page.locator('.cell_output img').nth(1)
    plot.scroll_into_view_if_needed()
    by_day = plot.screenshot()
    page.locator('button.theme-switch-button').click()
    page.locator('button.theme-change-button[data-mode=dark]').click()
    page.wait_for_selector('html[data-theme=dark]')
    page.wait_for_timeout(400)
    dark = page.evaluate(colours)
    assert light[0] != dark[0] and dark[1] == 'rgba(0, 0, 0, 0)'
    assert plot.screenshot() != by_day
    page.reload()
    assert page.evaluate('document.documentElement.dataset.theme') == 'dark'


@built
def test_names_and_terms_lead_on(visit):
    page = visit('08_decoding')
    page.locator('.bd-article p a.reference[href*="api/"]').first.click()
    page.wait_for_url('**/api/*.html*')
    page = visit('10_english_to_german')
    page.locator('a.code-link', has_text='train_tokenizer').first.click()
    page.wait_for_url('**/api/vocabulary.html#annotated_transformer.vocabulary.train_tokenizer')
    assert page.locator(':target').is_visible()
    page.locator('a', has_text='Page 21, Vocabulary').first.click()
    page.wait_for_url('**/21_vocabulary.html')
    term = page.locator('a.term').first
    term.hover()
    shown = term.evaluate("a => getComputedStyle(a, '::after').content")
    assert len(shown) > 20 and shown.strip('"')[:20] == term.get_attribute('data-definition')[:20]


@built
def test_live_views_open(visit, address):
    "On the front page and on a page with its own view; none of it is loaded before."
    page = visit('index')
    assert not page.locator('iframe').count()
    page.locator('a.start-live').click()
    page.frame_locator('iframe').locator('h1').wait_for()
    page = visit('01_attention')
    page.locator('details.live-view summary').click()
    assert page.locator('iframe').get_attribute('src') == 'explainer/index.html#view=attention&theme=light'
    frame = page.frame_locator('iframe')
    frame.locator('#ribbons').wait_for()
    link = frame.locator('a[href*="01_attention.html"]').first.evaluate('a => a.href')
    assert link.startswith(f'{address}01_attention.html')
    page.locator('button.theme-switch-button').click()
    page.locator('button.theme-change-button[data-mode=dark]').click()
    frame.locator('html[data-theme=dark]').wait_for()
    page = visit('index', **PHONE)
    page.locator('a.start-live').click()
    page.wait_for_url('**/explainer/index.html')


@built
def test_tables_of_results_sort(visit):
    page = visit('results')
    column = page.locator('table.sortable').first.locator('tbody tr td:nth-child(3)')
    page.locator('table.sortable').first.locator('th button', has_text='BLEU').click()
    values = [float(text.split()[0]) for text in column.all_inner_texts()]
    assert values == sorted(values, reverse=True) and len(values) > 10        # the best first
    page.locator('table.sortable').first.locator('th button', has_text='BLEU').click()
    assert [float(text.split()[0]) for text in column.all_inner_texts()] == sorted(values)
    page.locator('table.sortable').first.locator('th button', has_text='minutes').click()
    minutes = page.locator('table.sortable').first.locator('tbody tr td:nth-child(6)').all_inner_texts()
    numbers = [float(text) for text in minutes if text.strip()]
    assert numbers == sorted(numbers, reverse=True) and not any(text.strip() for text in minutes[len(numbers):])
    page.locator('table.sortable').first.locator('th button', has_text='task').click()
    tasks = page.locator('table.sortable').first.locator('tbody tr td:nth-child(1)').all_inner_texts()
    assert tasks == sorted(tasks, key=str.lower) and len(set(tasks)) > 2


@built
@pytest.mark.parametrize('how', [PHONE, DESK], ids=['phone', 'desk'])
def test_plots_of_results_fit_the_screen(visit, how):
    "Values and intervals are inside the window, below or beside their names, and a table does not catch the wheel."
    page = visit('results', **how)
    page.wait_for_load_state('networkidle')
    width = page.viewport_size['width']
    outside = page.locator('.chart').evaluate_all('''(charts, width) => charts.flatMap(chart => [
        ...chart.querySelectorAll('.name, .dot, .interval, .scale span')].map(part => part.getBoundingClientRect())
        .filter(box => box.left < 0 || box.right > width))''', width)
    assert outside == [] and page.locator('.chart .dot').count() > 40
    assert page.locator('.wide-table').evaluate_all('tables => tables.every(t => t.scrollHeight <= t.clientHeight + 1)')


@built
@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('name', [*SHOWN, 'api/decoding', 'glossary'])
def test_accessibility(visit, name, scheme):
    page = visit(name, color_scheme=scheme, reduced_motion='reduce')   # else colors may be measured during a transition
    page.wait_for_load_state('networkidle')
    page.keyboard.press('Tab')                  # from now on, what scrolls can be reached
    page.evaluate(AXE.read_text(encoding='utf-8'))
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})")['violations']
    serious = {fault['id']: [node['target'] for node in fault['nodes']][:5]
               for fault in found if fault['impact'] in ('serious', 'critical')}
    assert not serious, json.dumps(serious, indent=1)


def packed(path):
    "Size of a file as a server that compresses would send it."
    data = path.read_bytes()
    return len(data) if path.suffix in ('.png', '.webp', '.woff2') else len(gzip.compress(data, 6))


@built
def test_every_page_is_light(site):
    "With everything that it loads, pictures below the first screen too, every formula font, and every typeface."
    sizes = {}

    def size(path):
        if path not in sizes:
            sizes[path] = packed(path)
        return sizes[path]
    fonts = sum(packed(path) for path in (SITE / '_static').rglob('*.woff2'))
    weights = {}
    n_pictures = 0
    for name, page in site.items():
        loads = {unquote(urlparse(urljoin(f'/{name}', link)).path).lstrip('/') for link in page.loads
                 if not link.startswith('data:')}
        n_pictures += sum(link.endswith('.png') for link in loads)
        weights[name] = size(SITE / name) + sum(size(SITE / link) for link in loads) + fonts
    assert n_pictures > 150 and len(weights) > 120
    heavy = {name: weight for name, weight in weights.items() if weight >= MAX_PAGE_BYTES}
    assert not heavy, heavy


@built
@pytest.mark.parametrize('name', ['index', '01_attention', '92_diagrams'])
def test_pages_are_light(chromium, address, name):
    "In a browser that scrolls to the end, from an empty cache: nothing more is loaded than the test above counts."
    page = chromium.new_context(**DESK).new_page()
    bodies = []
    page.on('requestfinished', lambda request: bodies.append((request.url, request.response().body())))
    page.goto(f'{address}{name}.html')
    page.wait_for_load_state('networkidle')
    n_at_first = len(bodies)
    while not page.evaluate('scrollBy(0, 800), innerHeight + scrollY > document.documentElement.scrollHeight - 2'):
        page.wait_for_timeout(20)
    page.wait_for_load_state('networkidle')
    assert len(bodies) > n_at_first or name == 'index'      # pictures were loaded late
    sizes = {url: len(body) if url.endswith(('png', 'webp', 'woff2')) else len(gzip.compress(body, 6))
             for url, body in bodies}
    page.context.close()
    assert sum(sizes.values()) < MAX_PAGE_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:8]


@built
@pytest.mark.parametrize('name', SHOWN)
@pytest.mark.parametrize('how', ['light', 'dark', 'phone'])
def test_screenshots(visit, name, how):
    page = visit(name, **(PHONE if how == 'phone' else {'color_scheme': how}))
    page.wait_for_load_state('networkidle')
    PICTURES.mkdir(parents=True, exist_ok=True)
    assert page.screenshot(path=PICTURES / f'{name}-{how}.png')


@built
def test_pages_can_be_read_without_scripts(visit):
    page = visit('01_attention', java_script_enabled=False)
    assert page.locator('.katex').first.is_visible() and page.locator('article h2').first.is_visible()


@built
def test_tasks_of_a_newcomer(visit):
    "Each is two clicks from the front page."
    page = visit('index')
    page.locator('a', has_text='Install').first.click()
    assert page.locator('pre', has_text='pip install git+').first.is_visible()
    page = visit('index')
    assert page.locator('tr', has_text='Multi30k EN-DE').first.inner_text().count('39.')
    page.locator('a', has_text='Train on my data').click()
    page.wait_for_url('**/34_your_own_data.html')
    page.locator('pre', has_text='--tsv').first.wait_for()          # visible
    page = visit('index')
    page.locator('a', has_text='Reference').first.click()
    page.locator('article a', has_text='beam_search').first.click()
    page.wait_for_url('**/api/decoding.html#annotated_transformer.decoding.beam_search')
    assert 'length_penalty' in page.locator('dt:target').inner_text()
    page = visit('index')
    page.locator('nav a', has_text='01 Attention').first.click()
    page.locator('h2', has_text='Masks').wait_for()
