"The interactive explorer: its data are the maps, and in a real browser it is offline, true, quick, light and dark."
import builtins
import json
import os
from html import escape
from pathlib import Path

import numpy as np
import pytest
import torch

from annotated_transformer.attention_maps import AttentionMaps
from annotated_transformer.explorer import explore

pytest.importorskip('altair')
pytest.importorskip('vl_convert')

PICTURES = Path(__file__).parents[1] / 'runs' / 'explorer' # screenshots to look at
MARKS = '''async shape => {
  const view = await ready, found = []
  const visit = item => { for (const part of item.items || [])
    if (item.marktype !== shape) visit(part)
    else found.push({y: part.y, y2: part.y2, text: part.text, stroke: part.stroke, opacity: part.strokeOpacity}) }
  visit(view.scenegraph().root)
  return found
}'''


def random_weights(*shape, seed=0, causal=False):
    "Attention weights (layers, heads, queries, keys), no two heads alike."
    logits = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if causal:
        logits = logits.masked_fill(~torch.ones(shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return logits.softmax(-1)


def make_maps(n=6, m=8, n_layers=2, n_heads=3, **changes):
    fields = {'src': [f'source{i}' for i in range(n)], 'tgt': [f'target{i}' for i in range(m)],
              'encoder': random_weights(n_layers, n_heads, n, n),
              'decoder': random_weights(n_layers, n_heads, m, m, seed=1, causal=True),
              'cross': random_weights(n_layers, n_heads, m, n, seed=2)}
    return AttentionMaps(**{**fields, **changes})


# --- without a browser

def test_data_are_the_maps():
    maps = make_maps()
    data = explore(maps).spec['datasets']
    for kind in ('encoder', 'decoder', 'cross'):
        for row in data['heads']:
            if row['kind'] == kind:
                layer = getattr(maps, kind)[row['layer']]
                expected = layer.mean(0) if row['head'] < 0 else layer[row['head']]
                assert row['weights'] == np.rint(1000 * expected.numpy()).astype(int).ravel().tolist()
    assert len(data['heads']) == 3 * 2 * (1 + 3)


def test_queries_of_cross_attention_are_named_by_the_token_they_predict():
    data = explore(make_maps(2, 3)).spec['datasets']
    queries = {kind: [row['text'] for row in data['tokens'] if row['kind'] == kind and 'q' in row]
               for kind in ('encoder', 'decoder', 'cross')}
    assert queries == {'encoder': ['source0', 'source1'], 'decoder': ['target0', 'target1', 'target2'],
                       'cross': ['target1', 'target2', '<eos>']}


def test_pruned_heads_do_not_count_in_the_mean():
    encoder = random_weights(1, 3, 4, 4)
    encoder[0, 1] = 0
    rows = explore(make_maps(4, 4, 1, 3, encoder=encoder)).spec['datasets']['heads']
    mean = next(row['weights'] for row in rows if row['kind'] == 'encoder' and row['head'] == -1)
    assert sum(mean) == pytest.approx(4000, abs=8)


@pytest.mark.parametrize('changes, message', [
    ({'src': ['one']}, r"'encoder' have shape \(2, 3, 6, 6\), not \(layers, heads, 1 queries, 1 keys\)"),
    ({'tgt': ['one'], 'encoder': None, 'decoder': None}, r"'cross' have shape .*, 1 queries, 6 keys\)"),
    ({'encoder': random_weights(2, 3, 6, 6) * torch.nan}, 'not attention weights: they run from nan'),
    ({'encoder': -random_weights(2, 3, 6, 6)}, 'not attention weights'),
    ({'encoder': 2 * torch.ones(2, 3, 6, 6)}, 'not attention weights'),
    ({'src': []}, 'shape'),
])
def test_unfit_maps_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        explore(make_maps(**changes))


@pytest.mark.parametrize('options', [{'head': 3}, {'layer': 2}, {'kind': 'both'}])
def test_a_head_that_does_not_exist_is_refused(options):
    with pytest.raises(ValueError, match='there is no head'):
        explore(make_maps(), **options)


def test_a_model_with_cross_attention_alone():
    maps = make_maps(encoder=None, decoder=None)
    assert {row['kind'] for row in explore(maps).spec['datasets']['heads']} == {'cross'}
    with pytest.raises(ValueError, match="of 'encoder'"):
        explore(maps, kind='encoder')


def test_a_translator_is_asked_for_its_maps():
    class Parrot:
        def attention(self, text, translation):
            return make_maps(tgt=[translation] + [f'target{i}' for i in range(7)])
    explorer = explore(Parrot(), 'A sentence.', 'Ein Satz.')
    assert explorer.title == 'A sentence.'
    assert any(row['text'] == 'Ein Satz.' for row in explorer.spec['datasets']['tokens'])


def test_files_are_complete_or_untouched(tmp_path, monkeypatch):
    explorer = explore(make_maps(3, 4))
    path = tmp_path / 'attention.html'
    path.write_text('old')

    def fails(*_):
        raise OSError(28, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', fails)
        with pytest.raises(OSError, match='No space left'):
            explorer.save(path, overwrite=True)
    with pytest.raises(FileExistsError, match='attention.html exists: choose another file, or use overwrite=True'):
        explorer.save(path)
    assert path.read_text() == 'old' and list(tmp_path.iterdir()) == [path]
    assert explorer.save(str(path), overwrite=True) == path and path.read_text(encoding='utf-8') == explorer.html()
    with pytest.raises(FileNotFoundError, match='nowhere'):
        explorer.save(tmp_path / 'nowhere' / 'attention.html')


@pytest.mark.parametrize('missing', ['altair', 'vl_convert'])
def test_a_missing_library_is_named_with_its_extra(monkeypatch, missing):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name == missing:
            raise ImportError(name)
        return original(name, *args, **kwargs)
    monkeypatch.setattr(builtins, '__import__', without)
    with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[explorer\]'"):
        explore(make_maps())


# --- in a browser (`make test-site`)

in_browser = pytest.mark.site

@pytest.fixture
def visit(chromium, tmp_path):
    "Opens a page without a network. At the end, it must have loaded nothing else and reported no error."
    opened = []

    def open_page(what, scheme='light', width=1280, height=800):
        path = what if isinstance(what, Path) else what.save(tmp_path / 'attention.html', overwrite=True)
        context = chromium.new_context(color_scheme=scheme, viewport={'width': width, 'height': height}, offline=True)
        page = context.new_page()
        requests = []
        messages = []
        page.on('request', lambda request: requests.append(request.url))
        page.on('console', lambda message: messages.append(message.text))
        page.on('pageerror', lambda error: messages.append(str(error)))
        page.on('dialog', lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        opened.append((context, requests, messages, path.as_uri()))
        return page
    yield open_page
    for context, requests, messages, uri in opened:
        context.close()
        assert [url for url in requests if not url.startswith('about:')] == [uri] and messages == []


def keep(page, name):
    PICTURES.mkdir(parents=True, exist_ok=True)
    return page.screenshot(path=PICTURES / f'{name}.png', full_page=True)


def lines(page):
    "{(query, key): opacity} of every line drawn, and the set of their colours."
    found = page.evaluate(MARKS, 'rule')

    def index(y):
        return round((y - 120) / 26 - 0.5)
    return ({(index(line['y2']), index(line['y'])): line['opacity'] for line in found},
            {line['stroke'] for line in found})


def texts(page):
    return [mark['text'] for mark in page.evaluate(MARKS, 'text')]


def settle(page):
    page.evaluate('ready.then(view => view.runAsync()).then(() => 0)')


def point_at(page, side, number):
    "Put the pointer on a query or a key."
    box = page.locator('#view canvas').bounding_box()
    x, y = page.evaluate('ready.then(view => view.origin())')
    page.mouse.move(box['x'] + x + (420 if side == 'query' else 70), box['y'] + y + 120 + 26 * (number + 0.5))
    settle(page)


@in_browser
@pytest.mark.parametrize('kind', ['encoder', 'decoder', 'cross'])
def test_what_is_chosen_is_drawn(visit, kind):
    "Every kind, layer and head, and the mean of heads: the lines are the weights, to three digits."
    maps = make_maps()
    page = visit(explore(maps))
    page.locator(f'[value={kind}]').click()
    pictures = set()
    for layer in range(2):
        page.select_option('[name=pick_layer]', str(layer))
        for head in (-1, 0, 1, 2):
            page.select_option('[name=pick_head]', str(head))
            settle(page)
            weights = getattr(maps, kind)[layer]
            expected = weights.mean(0) if head < 0 else weights[head]
            thousandths = np.rint(1000 * expected.numpy()).astype(int)
            assert lines(page)[0] == {place: w / 1000 for place, w in np.ndenumerate(thousandths) if w >= 20}
            pictures.add(page.locator('#view canvas').screenshot())
    assert len(pictures) == 8
    shown = set(texts(page))
    assert set(maps.tgt if kind == 'decoder' else maps.src) <= shown
    assert ('target3' in shown) == (kind != 'encoder')
    assert {'encoder': 'queries: source', 'decoder': 'queries: target', 'cross': 'queries: predicted'}[kind] in shown


@in_browser
def test_a_click_on_the_table_chooses_a_head(visit):
    page = visit(explore(make_maps()))
    box, before = page.locator('#view canvas').bounding_box(), lines(page)[0]
    x, y = page.evaluate('ready.then(view => view.origin())')
    page.mouse.click(box['x'] + x + 52 + 17 * (2 + 1.5), box['y'] + y + 22 + 17 * 0.5)      # head 2 of layer 0
    settle(page)
    assert page.locator('[name=pick_head]').input_value() == '2'
    assert page.locator('[name=pick_layer]').input_value() == '0'
    assert lines(page)[0] != before
    page.mouse.click(box['x'] + x + 420, box['y'] + y + 200)                                # elsewhere: no change
    settle(page)
    assert page.locator('[name=pick_head]').input_value() == '2' and lines(page)[0]


@in_browser
def test_pointing_at_a_token_shows_its_weights(visit):
    maps = make_maps()
    page = visit(explore(maps, layer=1, head=1))
    quiet, plain = lines(page)
    point_at(page, 'query', 3)
    lit, colours = lines(page)
    assert ({place: lit[place] for place in lit if place[0] == 3}
            == {place: quiet[place] for place in quiet if place[0] == 3})
    assert all(lit[place] < 0.2 * quiet[place] for place in lit if place[0] != 3)
    assert len(plain) == 1 and len(colours) == 2
    numbers = sorted(text for text in texts(page) if '.' in str(text))
    assert numbers == sorted(f'{w:.2f}' for w in maps.cross[1, 1, 3].tolist() if w >= 0.005)
    keep(page, 'pointing')
    point_at(page, 'key', 4)
    lit, _ = lines(page)
    assert ({place: lit[place] for place in lit if place[1] == 4}
            == {place: quiet[place] for place in quiet if place[1] == 4})
    page.mouse.move(2, 2)
    settle(page)
    assert lines(page)[0] == quiet


@in_browser
def test_the_slider_hides_lines_of_small_weights(visit):
    page = visit(explore(make_maps(), head=0, threshold=0.1))
    before = lines(page)[0]
    assert min(before.values()) >= 0.1
    page.locator('[name=least]').fill('0.3')
    settle(page)
    assert lines(page)[0] == {place: w for place, w in before.items() if w >= 0.3}


@in_browser
def test_light_and_dark(visit):
    explorer = explore(make_maps())
    day, night = visit(explorer), visit(explorer, 'dark')

    def background(page):
        return page.evaluate('''getComputedStyle(document.body).backgroundColor +
                                document.querySelector('#view canvas').style.backgroundColor''')
    settle(day)
    settle(night)
    white, black = background(day), background(night)
    assert white != black and lines(day)[1] != lines(night)[1]
    assert keep(day, 'light') != keep(night, 'dark')
    night.locator('#theme').click()
    settle(night)
    assert background(night) == white and lines(night) == lines(day)
    day.emulate_media(color_scheme='dark')                  # the system changes
    day.wait_for_selector(':root.dark', state='attached')
    settle(day)
    assert background(day) == black


QUICK = '''async () => {
  const view = await ready, canvas = document.querySelector('#view canvas'), times = {}
  const drawn = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)))
  const time = async (name, act) => { times[name] = []; for (let i = 0; i < 6; i++) {
    const start = performance.now(); act(i); await view.runAsync(); await drawn();
    times[name].push(performance.now() - start) } }
  const choose = (name, i) => {
    const select = document.querySelector(`[name=${name}]`)
    select.selectedIndex = i
    select.dispatchEvent(new Event('change')) }
  await time('layer', i => choose('pick_layer', i))
  await time('head', i => choose('pick_head', i + 1))
  await time('kind', i => document.querySelectorAll('[name=kind]')[i % 3].click())
  const box = canvas.getBoundingClientRect(),
      at = i => ({clientX: box.left + 430, clientY: box.top + 300 + 40*i, bubbles: true})
  await time('pointer', i => canvas.dispatchEvent(new PointerEvent('pointermove', at(i))))
  return times
}'''


@in_browser
def test_sixty_tokens_are_small_and_quick(visit, tmp_path):
    "60 tokens a side, 6 layers, 8 heads: under 5 MB, and an answer within 200 ms."
    path = explore(make_maps(60, 60, 6, 8), layer=2, head=3).save(tmp_path / 'large.html')
    assert path.stat().st_size < 5e6
    page = visit(path, width=1400, height=1100)
    times = page.evaluate(QUICK)
    assert page.evaluate('ready.then(view => view.signal("hover_q"))') is not None
    assert all(min(all_times) < 200 for all_times in times.values()), times
    page.select_option('[name=pick_head]', '3')
    settle(page)
    keep(page, 'sixty')


@in_browser
def test_tokens_are_data(visit):
    "Whatever a token says is shown, and not done."
    rude = ['</script><script>alert(1)</script>', '<img src=x onerror=alert(2)>', '"\'`${1}\\',
            '\u05e9\u05dc\u05d5\u05dd',
            '👩‍👩‍👧', '', ' ', '\n', '<!--', '\u2028', '%s', '▁the', '\ud800', '</title><b>']
    maps = make_maps(len(rude), 3, 1, 2, src=rude)
    page = visit(explore(maps, title='</title><script>alert(3)</script> & "co"', kind='encoder'))
    shown = texts(page)
    expected = [repr(token) if not token.strip() else token for token in rude if token != '\ud800']
    assert all(shown.count(token) == 3 for token in expected), shown    # twice beside the lines, once above the map
    assert page.title() == '</title><script>alert(3)</script> & "co"'
    point_at(page, 'query', 1)
    page.wait_for_selector('#vg-tooltip-element.visible')
    assert page.locator('#vg-tooltip-element').inner_text() == '<img src=x onerror=alert(2)>'
    assert page.locator('img').count() == 0
    keep(page, 'rude')


# How notebooks show a cell's HTML: as it is (JupyterLab), written into a page with a strict policy (VS Code),
# or in a frame that may run scripts (Colab).
POLICY = ("default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
          "img-src https: http: data:; font-src https:; connect-src https:; child-src https: data:;")


def in_jupyterlab(cell):
    return cell


def in_vs_code(cell):
    text = json.dumps(cell).replace('<', r'\u003c')
    return (f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><div id="out"></div>'
            f'<script>document.getElementById("out").innerHTML = {text}</script>')


def in_colab(cell):
    return f'<iframe sandbox="allow-scripts" style="width: 100%; height: 700px" srcdoc="{escape(cell)}"></iframe>'


@in_browser
@pytest.mark.parametrize('host, depth', [(in_jupyterlab, 1), (in_vs_code, 1), (in_colab, 2)],
                         ids=['JupyterLab', 'VS Code', 'Colab'])
def test_notebooks_show_it_in_a_frame(visit, tmp_path, host, depth):
    (tmp_path / 'notebook.html').write_text(
        '<!doctype html><meta charset="utf-8"><title>a notebook</title>'
        f'{host(explore(make_maps(4, 5))._repr_html_())}', encoding='utf-8')
    page = visit(tmp_path / 'notebook.html')
    inner = page
    for _ in range(depth):
        inner = inner.frame_locator('iframe')
    inner.locator('#view canvas').wait_for()
    frame = page.frames[depth]
    before = frame.evaluate(MARKS, 'rule')
    assert before and 'target4' in [mark['text'] for mark in frame.evaluate(MARKS, 'text')]
    assert frame.evaluate('document.documentElement.scrollHeight - innerHeight') <= 0       # the frame is tall enough
    inner.locator('[name=pick_head]').select_option('1')
    settle(frame)
    assert frame.evaluate(MARKS, 'rule') != before
    keep(page, host.__name__)
