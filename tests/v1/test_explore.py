"The interactive page in a real browser: offline, quiet, true to the weights, quick, by day and by night."
import json
import os
import shutil
import weakref
from html import escape
from pathlib import Path

import numpy as np
import pytest
import torch

from annotated_transformer.v1.attention import record_attention
from annotated_transformer.v1.transformer import Transformer, TransformerConfig
from annotated_transformer.v1.visualize import explore

PICTURES = Path(__file__).parents[2]/'runs'/'explore'      # screenshots, for whoever wants to look
FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
         '--disable-component-update', '--disable-sync']
HOW = 'no browser: `apt-get install chromium`, or `.venv/bin/playwright install chromium`'
MARKS = '''async shape => {
  const view = await ready, found = []
  const visit = item => { for (const part of item.items || [])
    if (item.marktype !== shape) visit(part)
    else found.push({y: part.y, y2: part.y2, text: part.text, stroke: part.stroke, opacity: part.strokeOpacity}) }
  visit(view.scenegraph().root)
  return found
}'''


def weights(*shape, seed=0, causal=False):
    "Made-up attention of (layers, heads, queries, keys): no two heads alike, every row a distribution."
    scores = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))*3
    if causal: scores = scores.masked_fill(~torch.ones(shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1)

def maps(n, m, n_layers=2, n_heads=3):
    "All three kinds for `n` source and `m` target tokens."
    return dict(src=[f'source{i}' for i in range(n)], tgt=[f'target{i}' for i in range(m)],
                encoder=weights(n_layers, n_heads, n, n),
                decoder=weights(n_layers, n_heads, m, m, seed=1, causal=True),
                cross=weights(n_layers, n_heads, m, n, seed=2))


@pytest.fixture(scope='module')
def chromium():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        own, installed = playwright.chromium.executable_path, ('chromium', 'chromium-browser', 'google-chrome')
        found = own if Path(own).exists() else next(filter(None, map(shutil.which, installed)), None)
        if not found: (pytest.fail if os.environ.get('CI') else pytest.skip)(HOW)
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()

@pytest.fixture
def visit(chromium, tmp_path):
    """Opens a page without a network; at the end it must have asked for itself alone,
    and have had nothing to complain of."""
    opened = []
    def open_page(what, scheme='light', width=1280, height=800):
        path = what if isinstance(what, Path) else what.save(tmp_path/'attention.html')
        context = chromium.new_context(color_scheme=scheme, viewport=dict(width=width, height=height), offline=True)
        page, asked, said = context.new_page(), [], []
        page.on('request', lambda request: asked.append(request.url))
        page.on('console', lambda message: said.append(message.text))
        page.on('pageerror', lambda error: said.append(str(error)))
        page.on('dialog', lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        opened.append((context, asked, said, path.as_uri()))
        return page
    yield open_page
    for context, asked, said, uri in opened:
        context.close()
        assert [url for url in asked if not url.startswith('about:')] == [uri] and said == []

def keep(page, name):
    PICTURES.mkdir(parents=True, exist_ok=True)
    return page.screenshot(path=PICTURES/f'{name}.png', full_page=True)

def lines(page):
    "(query, key) → opacity of every line drawn, and the set of their colours."
    found, step, top = page.evaluate(MARKS, 'rule'), 26, 120
    at = lambda y: round((y - top)/step - 0.5)
    return {(at(line['y2']), at(line['y'])): line['opacity'] for line in found}, {line['stroke'] for line in found}

def words(page): return [mark['text'] for mark in page.evaluate(MARKS, 'text')]

def settle(page): page.evaluate('ready.then(view => view.runAsync()).then(() => 0)')


def point_at(page, side, number, top=120, step=26):
    "Put the pointer on a token that looks, or is looked at."
    box = page.locator('#view canvas').bounding_box()
    x, y = page.evaluate('ready.then(view => view.origin())')
    page.mouse.move(box['x'] + x + (420 if side == 'looking' else 70), box['y'] + y + top + step*(number + 0.5))
    settle(page)

@pytest.mark.parametrize('kind', ['encoder', 'decoder', 'cross'])
def test_what_is_chosen_is_drawn(visit, kind):
    "Every kind, layer and head, and the mean of heads: the lines are the weights, to three digits."
    given = maps(6, 8)
    page = visit(explore(given))
    page.locator(f'[value={kind}]').click()
    pictures = set()
    for layer in range(2):
        page.select_option('[name=pick_layer]', str(layer))
        for head in (-1, 0, 1, 2):
            page.select_option('[name=pick_head]', str(head))
            settle(page)
            wanted = given[kind][layer].mean(0) if head < 0 else given[kind][layer, head]
            thousandths = np.rint(1000*wanted.numpy()).astype(int)
            assert lines(page)[0] == {(q, k): w/1000 for (q, k), w in np.ndenumerate(thousandths) if w >= 20}
            pictures.add(page.locator('#view canvas').screenshot())
    assert len(pictures) == 8
    keys = given['tgt' if kind == 'decoder' else 'src']
    assert set(keys) <= set(words(page)) and (kind != 'encoder' or 'target0' not in words(page))


def test_the_table_of_heads_chooses(visit):
    page = visit(explore(maps(6, 8)))
    box, before = page.locator('#view canvas').bounding_box(), lines(page)[0]
    x, y = page.evaluate('ready.then(view => view.origin())')
    page.mouse.click(box['x'] + x + 52 + 17*(2 + 1.5), box['y'] + y + 22 + 17*0.5)      # head 2 of layer 0
    settle(page)
    assert (page.locator('[name=pick_head]').input_value() == '2'
            and page.locator('[name=pick_layer]').input_value() == '0')
    assert lines(page)[0] != before
    page.mouse.click(box['x'] + x + 420, box['y'] + y + 200)    # elsewhere: nothing is chosen or lost
    settle(page)
    assert page.locator('[name=pick_head]').input_value() == '2' and lines(page)[0]


def test_pointing_at_a_token_shows_its_lines(visit):
    given = maps(6, 8)
    page = visit(explore(given, layer=1, head=1))
    quiet, plain = lines(page)
    point_at(page, 'looking', 3)
    lit, colours = lines(page)
    row = given['cross'][1, 1, 3]
    assert {pair: lit[pair] for pair in lit if pair[0] == 3} == {pair: quiet[pair] for pair in quiet if pair[0] == 3}
    assert all(lit[pair] < 0.2*quiet[pair] for pair in lit if pair[0] != 3)
    assert len(plain) == 1 and len(colours) == 2    # its lines have a colour of their own
    assert (sorted(word for word in words(page) if '.' in str(word))
            == sorted(f'{w:.2f}' for w in row.tolist() if w >= 0.005))
    keep(page, 'hover')
    point_at(page, 'looked at', 4)    # and who looks at a source token
    lit, _ = lines(page)
    assert {pair: lit[pair] for pair in lit if pair[1] == 4} == {pair: quiet[pair] for pair in quiet if pair[1] == 4}
    page.mouse.move(2, 2)
    settle(page)
    assert lines(page)[0] == quiet


def test_slider_and_contrast(visit):
    page = visit(explore(maps(6, 8), head=0, threshold=0.1))
    before = lines(page)[0]
    assert min(before.values()) >= 0.1
    page.locator('[name=least]').fill('0.3')
    settle(page)
    assert lines(page)[0] == {pair: w for pair, w in before.items() if w >= 0.3}
    page.locator('[name=contrast]').fill('2')
    settle(page)
    assert lines(page)[0] == pytest.approx({pair: min(1, 2*w) for pair, w in before.items() if w >= 0.3})


def test_light_and_dark(visit):
    explorer = explore(maps(6, 8))
    day, night = visit(explorer), visit(explorer, 'dark')
    paper = lambda page: page.evaluate('''getComputedStyle(document.body).backgroundColor +
                                              document.querySelector('#view canvas').style.backgroundColor''')
    settle(day), settle(night)
    white, black = paper(day), paper(night)
    assert white != black and lines(day)[1] != lines(night)[1]
    assert keep(day, 'day') != keep(night, 'night')
    night.locator('#theme').click()                                                     # the switch
    settle(night)
    assert paper(night) == white and lines(night) == lines(day)
    day.emulate_media(color_scheme='dark')                   # the system changes
    day.wait_for_selector(':root.dark', state='attached')    # and tells the page when it has a moment
    settle(day)
    assert paper(day) == black


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

def test_sixty_tokens_are_light_and_quick(visit, tmp_path):
    "60 tokens a side, 6 layers, 8 heads: under 5 MB, and an answer within 200 ms."
    path = explore(maps(60, 60, 6, 8), layer=2, head=3).save(tmp_path/'large.html')
    assert path.stat().st_size < 5e6
    page = visit(path, width=1400, height=1100)
    times = page.evaluate(QUICK)
    print(f'{path.stat().st_size/1e6:.2f} MB; ms: {({name: [round(ms) for ms in all] for name, all in times.items()})}')
    assert page.evaluate('ready.then(view => view.signal("hq"))') is not None           # the pointer had been seen
    assert all(min(all) < 200 for all in times.values()), times
    page.select_option('[name=pick_head]', '3')
    settle(page)
    keep(page, 'sixty')


def test_tokens_cannot_act(visit):
    "What a token says is shown, whatever it says."
    rude = ['</script><script>alert(1)</script>', '<img src=x onerror=alert(2)>',
            '"\'`${1}\\', '\u05e9\u05dc\u05d5\u05dd',
            '👩‍👩‍👧', '', ' ', '\n', '<!--', '\u2028', '%s', '▁the', '\ud800', '</title><b>']
    given = dict(src=rude, encoder=weights(1, 2, len(rude), len(rude)))
    page = visit(explore(given, title='</title><script>alert(3)</script> & "co"'))
    shown = words(page)
    wanted = [repr(token) if not token.strip() else token for token in rude]
    # twice side by side, once above the map
    assert all(shown.count(token) == 3 for token in wanted if token != '\ud800'), shown
    assert page.title() == '</title><script>alert(3)</script> & "co"'
    point_at(page, 'looking', 1)
    page.wait_for_selector('#vg-tooltip-element.visible')
    assert page.locator('#vg-tooltip-element').inner_text() == '<img src=x onerror=alert(2)>'
    assert page.locator('img').count() == 0
    keep(page, 'rude')


# How notebooks put a cell's HTML before the reader: as it stands (JupyterLab); written into a page whose
# policy forbids nearly all (VS Code, with its strictest setting); in a frame of its own that may run
# scripts (Colab).
POLICY = ("default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
          "img-src https: http: data:; font-src https:; connect-src https:; child-src https: data:;")
def in_jupyterlab(cell): return cell
def in_vs_code(cell):
    text = json.dumps(cell).replace('<', r'\u003c')
    return (f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><div id="out"></div>'
            f'<script>document.getElementById("out").innerHTML = {text}</script>')
def in_colab(cell):
    return f'<iframe sandbox="allow-scripts" style="width: 100%; height: 700px" srcdoc="{escape(cell)}"></iframe>'

@pytest.mark.parametrize('host, depth', [(in_jupyterlab, 1), (in_vs_code, 1), (in_colab, 2)],
                         ids=['JupyterLab', 'VS Code', 'Colab'])
def test_a_notebook_shows_it_in_a_frame(visit, tmp_path, host, depth):
    (tmp_path/'notebook.html').write_text(
        '<!doctype html><meta charset="utf-8"><title>a notebook</title>'
        f'{host(explore(maps(4, 5))._repr_html_())}', encoding='utf-8')
    page = visit(tmp_path/'notebook.html')
    inner = page
    for _ in range(depth): inner = inner.frame_locator('iframe')
    inner.locator('#view canvas').wait_for()
    frame = page.frames[depth]
    assert frame.evaluate(MARKS, 'rule') and 'target4' in [mark['text'] for mark in frame.evaluate(MARKS, 'text')]
    assert frame.evaluate('document.documentElement.scrollHeight - innerHeight') <= 0   # the frame is tall enough
    before = frame.evaluate(MARKS, 'rule')
    inner.locator('[name=pick_head]').select_option('1')
    settle(frame)
    assert frame.evaluate(MARKS, 'rule') != before                                      # and it answers
    keep(page, host.__name__)


def test_one_head_one_kind_and_ragged_layers(visit):
    "Layers whose heads have been pruned differ in number; a head that a layer lacks is an empty map."
    ragged = [weights(1, 3, 4, 4)[0], weights(1, 1, 4, 4)[0]]
    page = visit(explore(dict(src='abcd', encoder=ragged)))
    page.select_option('[name=pick_head]', '2')
    settle(page)
    assert lines(page)[0] == {} and page.locator('[name=kind]').count() == 1
    page.select_option('[name=pick_layer]', '0')
    settle(page)
    assert lines(page)[0]
    assert lines(visit(explore(dict(tgt=['one'], decoder=np.ones((1, 1, 1, 1))))))[0] == {(0, 0): 1}


def test_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    explorer, path = explore(maps(3, 4)), tmp_path/'attention.html'
    path.write_text('what was there')
    def fails(*_): raise OSError(28, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', fails)
        with pytest.raises(OSError, match='No space left'): explorer.save(path)
    assert path.read_text() == 'what was there' and list(tmp_path.iterdir()) == [path]
    assert explorer.save(str(path)) == path and path.read_text(encoding='utf-8') == explorer.html()
    with pytest.raises(FileNotFoundError, match='there is no folder .*nowhere'):
        explorer.save(tmp_path/'nowhere'/'attention.html')


@pytest.mark.parametrize('change, message', [
    (dict(cross=weights(2, 3, 6, 8)),
     r"layer 0 of 'cross' has maps of shape \(3, 6, 8\), not \(heads, 8 queries, 6 keys\)"),
    (dict(cross=weights(2, 8, 6)), r"not \(heads"),    # the axis of layers or of heads left out
    (dict(encoder=weights(2, 3, 6, 6)*torch.nan), 'no attention weights: they run from nan'),
    (dict(encoder=-weights(2, 3, 6, 6)), 'no attention weights'),
    (dict(tgt=None), "'decoder' need the tokens of 'tgt'"),
    (dict(src=[], tgt=[], encoder=torch.ones(1, 1, 0, 0)), 'shape'),
])
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=message): explore({**maps(6, 8), **change})


def test_maps_are_had_without_a_trace():
    "A whole model keeps its attributes, state and outputs, and weights live only as long as somebody holds them."
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=20, n_layers=2, d_model=16, d_ff=32, n_heads=4, max_len=12)).eval()
    src, tgt = torch.tensor([[5, 6, 7, 2]]), torch.tensor([[1, 8, 9]])
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        quiet = model(src, tgt)
        with record_attention(model) as seen: loud = model(src, tgt)
        one = next(iter(seen.values()))[0]
        stacked = {kind: torch.stack([w[0][0] for name, w in seen.items() if side in name and kind in name])
                   for side, kind in (('encoder', 'self_attention'), ('decoder', 'cross_attention'))}
        held = weakref.ref(one)
        del seen, one
        assert held() is None                                                           # nobody keeps them alive
        torch.testing.assert_close(loud, quiet)
        assert torch.equal(model(src, tgt), quiet)
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    explore(dict(src='abcd', tgt='xyz', encoder=stacked['self_attention'], cross=stacked['cross_attention']))
