"Plots draw the right numbers, and every drawing reads on a white and on a dark ground, without overlaps."
import inspect
import re
from functools import cache
from io import BytesIO
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from PIL import Image

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from annotated_transformer import diagrams, drawing, plotting
from annotated_transformer.plotting import *

ROOT = Path(__file__).resolve().parents[1]
GROUNDS = ['#ffffff', '#121417']
COLORS = ['BLUE', 'ORANGE', 'GREEN', 'PURPLE', 'RED', 'GREY', 'TEAL', 'PINK', 'GOLD']
STEPS = [[(0, 'der', -0.1, 'active'), (0, 'die', -4.0, 'pruned')],
         [(0, 'kleine', -0.2, 'active'), (0, 'EOS', -3.0, 'finished')]]
DRAWINGS = {name: {} for name in diagrams.__all__} | {
    'beam': dict(steps=STEPS), 'layer-decoder-pre': dict(kind='decoder', norm='pre'), 'layers-pre': dict(norm='pre'),
    'ngram_matches': dict(translations=[['ein', 'kleiner', 'Hund'], ['die'] * 4], reference=['die', 'ein', 'die', 'Hund'])}


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close('all')


@cache
def draw(name):
    "The figure that a drawing function makes, drawn once for all tests."
    getattr(diagrams, name.split('-')[0])(**DRAWINGS[name])
    figure = plt.gcf()
    figure.canvas.draw()
    return figure


def labels(figure):
    "Text and extent in pixels of every label that is not empty."
    return [(t, t.get_window_extent()) for t in figure.axes[0].texts if t.get_text().strip()]


def overlap(a, b):
    "Width and height of the common part of two extents, in pixels."
    return min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)


def overlapping(extents, margin=1):
    "Pairs of names whose extents share more than `margin` pixels in both directions."
    return [(a, b) for (a, x), (b, y) in combinations(extents, 2) if min(overlap(x, y)) > margin]


def written(ax):
    return [t.get_text() for t in ax.texts]


# --- colours

@pytest.mark.parametrize('name', COLORS)
def test_colours_read_on_white_and_dark_and_under_white_text(name):
    color = getattr(plotting, name)
    assert all(plotting.contrast(color, ground) >= 4 for ground in GROUNDS)
    assert plotting.contrast(color, 'white') >= 4


def test_contrast_known_values():
    assert plotting.contrast('black', 'white') == pytest.approx(21)
    assert plotting.contrast('#777777', 'white') == pytest.approx(4.48, abs=0.01)


def test_text_in_heatmap_cells_keeps_its_contrast():
    for negative in ('', BLUE):
        for color in COLORS:
            for fill in plotting.color_map(getattr(plotting, color), negative)(np.linspace(0, 1, 40)):
                assert fill[3] == 1 and plotting.contrast(plotting.ink(fill), fill) >= 4


# --- plots

def test_heatmap_writes_its_numbers_and_names():
    values = torch.tensor([[0.25, 0.75], [1., 0.]], requires_grad=True)
    ax = heatmap(figure(), values, 'title', ['a', 'b'], ['c', '$d$'])
    assert written(ax) == ['0.25', '0.75', '1.00', '0.00']
    assert [t.get_text() for t in ax.get_yticklabels()] == ['a', 'b']
    assert [t.get_text() for t in ax.get_xticklabels()] == ['c', r'\$d\$']
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ('title', 'key', 'query')
    assert written(heatmap(figure(), [[0.5, -0.25]])) == ['0.50', '−0.25']


def test_heatmap_first_row_is_on_top_and_larger_is_darker():
    ax = heatmap(figure(), [[0.1, 0.9]], numbers=True)
    small, large = [patch.get_facecolor() for patch in ax.patches]
    assert sum(large[:3]) < sum(small[:3])
    assert ax.get_ylim()[0] > ax.get_ylim()[1]


def test_heatmap_numbers_depend_on_the_size_and_bfloat16_is_accepted():
    assert not written(heatmap(figure(), torch.rand(3, 9, dtype=torch.bfloat16)))
    assert len(written(heatmap(figure(), torch.rand(3, 8)))) == 24
    assert not written(heatmap(figure(), torch.rand(3, 3), numbers=False))


def test_heatmap_signs_have_different_colours():
    ax = heatmap(figure(), [[-1., 1.]], cmap=ORANGE, negative=BLUE, numbers=False)
    negative, positive = [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in ax.patches]
    assert (negative, positive) == (BLUE, ORANGE)


def test_mask_map_colours_what_may_be_attended_to():
    ax = mask_map(figure(), torch.tensor([[True, False], [True, True]]))
    drawn = [matplotlib.colors.to_hex(patch.get_facecolor(), keep_alpha=True) for patch in ax.patches]
    assert [color == PALE for color in drawn] == [False, True, False, False]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ['masked', 'may attend']


def test_categories_legend_and_colours():
    ax = categories(figure(), [[0, 2]], '', ['none', 'flow', 'leak'])
    assert matplotlib.colors.to_hex(ax.patches[1].get_facecolor()) == RED
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ['none', 'flow', 'leak']


def test_bars_carry_their_values():
    ax = bars(figure(), ['a', 'b'], torch.tensor([1.5, -0.25]), fmt='.1f')
    assert written(ax) == ['1.5', '−0.2']
    assert [patch.get_height() for patch in ax.patches] == [1.5, -0.25]


def test_curves_draw_lines_bands_and_a_legend():
    x = torch.arange(1, 4)
    ax = curves(figure(), x, {'plain': x, 'band': dict(y=x * 2, low=x, high=x * 3, color=RED)}, log='xy')
    assert [line.get_ydata().tolist() for line in ax.lines] == [[1, 2, 3], [2, 4, 6]]
    assert ax.lines[1].get_color() == RED and len(ax.collections) == 1
    assert (ax.get_xscale(), ax.get_yscale()) == ('log', 'log')
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ['plain', 'band']


def test_grid_of_maps_has_a_row_for_each_layer():
    axes = grid_of_maps(torch.rand(2, 3, 4, 5))
    assert axes.shape == (2, 3)
    assert [ax.get_title() for ax in axes[0]] == ['head 0', 'head 1', 'head 2']
    assert [ax.get_ylabel() for ax in axes[:, 0]] == ['layer 0', 'layer 1']


def test_ribbons_start_at_the_query_and_end_at_the_key():
    ax = ribbons(figure(), [[0., 1.], [0.01, 0.99]], ['q0', 'q1'], ['k0', 'k1'])
    ends = [(line.get_xdata()[0], line.get_xdata()[-1]) for line in ax.lines]
    assert ends == [(0.25, 0.75), (0.75, 0.75)]


# --- what a notebook stores

def test_stored_pictures_are_small_transparent_and_true():
    diagrams.transformer()
    small = plotting.palette_png(plt.gcf())
    full = BytesIO()
    plt.gcf().savefig(full, format='png', dpi=110, bbox_inches='tight')
    assert len(small) < 60_000 and len(small) < len(full.getvalue()) / 2
    pictures = [np.asarray(Image.open(x).convert('RGBA').convert('RGBa'), dtype=int) for x in (BytesIO(small), full)]
    assert pictures[0][0, 0, 3] == 0
    assert np.abs(pictures[0] - pictures[1]).mean() < 0.3
    assert np.abs(pictures[0] - pictures[1]).max() < 50 # the edges of letters keep their colour
    assert plt.gcf().get_facecolor()[3] == 0


# --- drawings

def test_an_arrow_may_return_to_its_start_and_repeat_a_corner():
    ax = drawing.canvas(3, 3)
    drawing.arrow(ax, (0, 0), (2, 0), (2, 0), (2, 2), (0, 0), radius=0.1)
    vertices = ax.patches[-1].get_path().vertices
    plt.close(ax.figure)
    assert np.isfinite(vertices).all()
    assert vertices[-1].tolist() == [0, 0] and vertices.max(axis=0).tolist() == [2, 2]

def test_overlaps_are_found():
    ax = drawing.canvas(3, 1)
    drawing.label(ax, 1, 0.5, 'one label')
    drawing.label(ax, 1.2, 0.5, 'another')
    ax.figure.canvas.draw()
    assert len(overlapping(labels(ax.figure))) == 1


@pytest.mark.parametrize('name', DRAWINGS)
def test_labels_stay_in_the_figure_and_apart(name):
    shown = labels(draw(name))
    page = draw(name).bbox
    outside = [t.get_text() for t, box in shown if box.x0 < 0 or box.y0 < 0 or box.x1 > page.x1 or box.y1 > page.y1]
    assert not outside
    touching = [(a.get_text(), b.get_text()) for a, b in overlapping(shown)]
    assert not touching


@pytest.mark.parametrize('name', DRAWINGS)
def test_labels_do_not_cross_the_edges_of_boxes(name):
    figure = draw(name)
    shapes = [p for p in figure.axes[0].patches if isinstance(p, (FancyBboxPatch, Rectangle))]
    edges = [p.get_window_extent() for p in shapes]
    crossing = []
    for text, box in labels(figure):
        for edge in edges:
            width, height = overlap(box, edge)
            inside = width >= box.width - 1 and height >= box.height - 1
            if min(width, height) > 2 and not inside:
                crossing.append(text.get_text())
    assert not crossing


@pytest.mark.parametrize('name', DRAWINGS)
def test_no_arrow_runs_through_a_label(name):
    figure = draw(name)
    crossing = []
    for arrow in figure.axes[0].patches:
        if isinstance(arrow, FancyArrowPatch):
            lines = arrow.get_path().to_polygons(closed_only=False)
            pairs = [pair for line in lines for pair in zip(line, line[1:])]
            points = [start + (end - start) * t for start, end in pairs for t in np.linspace(0, 1, 50)]
            pixels = figure.axes[0].transData.transform(points)
            crossing += [text.get_text() for text, box in labels(figure) if box.count_contains(pixels)]
    assert not crossing


@pytest.mark.parametrize('name', DRAWINGS)
def test_labels_keep_their_contrast(name):
    figure = draw(name)
    boxes = [p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch) and p.get_facecolor()[3] == 1]
    for text, place in labels(figure):
        x, y = (place.x0 + place.x1) / 2, (place.y0 + place.y1) / 2
        under = [b.get_facecolor() for b in boxes if b.get_window_extent().contains(x, y)]
        grounds = under or GROUNDS
        assert all(plotting.contrast(text.get_color(), ground) >= 4 for ground in grounds), text.get_text()
        assert text.get_fontsize() >= 7


@pytest.mark.parametrize('name', DRAWINGS)
def test_drawings_fit_a_page(name):
    width, height = draw(name).get_size_inches()
    assert width <= 7.5 and height <= 8


def test_boxes_have_the_names_of_the_code():
    from annotated_transformer.transformer import Transformer, TransformerConfig
    model = Transformer(TransformerConfig(vocab_size=10, n_layers=1, d_model=8, d_ff=8, n_heads=2))
    names = {part for name, _ in model.named_modules() for part in name.split('.')}
    drawn = {t.get_text() for t, _ in labels(draw('transformer'))}
    expected = {'src_embed', 'tgt_embed', 'src_positions', 'tgt_positions', 'dropout', 'encoder', 'decoder', 'lm_head',
                'self_attention', 'cross_attention', 'feed_forward', 'residual1', 'residual2', 'residual3'}
    assert expected <= names and expected <= drawn
    assert {'q_proj', 'k_proj', 'v_proj', 'out_proj'} <= names & {t.get_text() for t, _ in labels(draw('heads'))}


def test_target_shift_aligns_inputs_with_what_they_predict():
    diagrams.target_shift(['ein', 'Hund'])
    rows = {}
    for text in plt.gcf().axes[0].texts:
        if text.get_text() in ('BOS', 'ein', 'Hund', 'EOS'):
            rows.setdefault(round(text.get_position()[1], 1), []).append((text.get_position()[0], text.get_text()))
    upper, lower = [sorted(rows[y]) for y in sorted(rows, reverse=True)]
    assert [token for _, token in upper] == ['BOS', 'ein', 'Hund']
    assert [token for _, token in lower] == ['ein', 'Hund', 'EOS']
    assert [x for x, _ in upper] == [x for x, _ in lower]


def test_beam_shows_every_hypothesis():
    texts = [t.get_text() for t, _ in labels(draw('beam'))]
    assert {'der', '-0.10', 'die', '-4.00', 'kleine', 'EOS', 'active', 'pruned', 'finished'} <= set(texts)


def test_ngram_matches_are_clipped():
    texts = [t.get_text() for t, _ in labels(draw('ngram_matches'))]
    assert [text for text in texts if '/' in text] == ['2/3', '0/2', '0/1', '2/4', '0/3', '0/2', '0/1']


def test_the_table_of_diagrams_names_their_pages():
    pages = {path.name[:2]: path.read_text(encoding='utf-8') for path in (ROOT / 'nbs').glob('[0-9]*.ipynb')}
    used = {name: {page for page, text in pages.items() if page != '92' and f'diagrams.{name}(' in text}
            for name in diagrams.__all__}
    table = {}
    for row in re.findall(r'"\| (\[`.*?) \| (.*?) \|', pages['92']):
        for name in re.findall('`(.*?)`', row[0]):
            table[name] = set(row[1].split(', '))
    assert table == used


def test_every_drawing_says_what_it_shows():
    assert all(inspect.getdoc(getattr(diagrams, name)) for name in diagrams.__all__)
