"Draw images/attention.svg, the picture of the front page, from the model that comes with the package."
from html import escape
from pathlib import Path

from annotated_transformer.translator import Translator

SENTENCE = 'The dog sees the cat because it is tired.'
LETTER = 9.4
GAP = 22
TOP, BOTTOM = 34, 184
SMALLEST = 0.05                # weights below are not drawn
STYLE = '''.attention-picture text { font: 600 18px 'Source Sans 3', 'Segoe UI', Arial, sans-serif; fill: #1f2d3d }
.attention-picture path { fill: none; stroke: #0072b2; stroke-linecap: round }
@media (prefers-color-scheme: dark) {
  .attention-picture text { fill: #e6edf3 } .attention-picture path { stroke: #56b4e9 } }'''


def words_of(tokens):
    "Words with the positions of their tokens; a full stop or a comma belongs to the word before."
    words = []
    for position, token in enumerate(tokens):
        if token.startswith('▁'):
            words.append([token[1:], [position]])
        elif not token.startswith('<'):
            words[-1][0] += token
            words[-1][1].append(position)
    return words


def places(words, width):
    "The middle of each word in a centred line."
    sizes = [len(word) * LETTER for word, _ in words]
    left = (width - sum(sizes) - GAP * (len(words) - 1)) / 2
    found = []
    for size in sizes:
        found.append(left + size / 2)
        left += size + GAP
    return found


def main():
    translator = Translator.load()
    translation = translator.translate(SENTENCE)
    maps = translator.attention(SENTENCE, translation)
    weights = maps.cross[-1].mean(0)                 # mean of the heads of the last layer
    source = words_of(maps.src)
    target = words_of(maps.tgt[1:])                  # row i of the weights predicts target token i
    width = 560
    top = places(source, width)
    bottom = places(target, width)
    lines = []
    for (_, queries), x2 in zip(target, bottom, strict=True):
        for (_, keys), x1 in zip(source, top, strict=True):
            weight = weights[queries][:, keys].sum(1).mean().item()
            if weight >= SMALLEST:
                curve = f'M{x1:.0f} {TOP + 12}C{x1:.0f} {TOP + 80} {x2:.0f} {BOTTOM - 90} {x2:.0f} {BOTTOM - 22}'
                width_and_opacity = f'stroke-width="{1 + 7 * weight:.1f}" stroke-opacity="{0.15 + 0.65 * weight:.2f}"'
                lines.append(f'<path d="{curve}" {width_and_opacity}/>')
    for words, xs, y in ((source, top, TOP), (target, bottom, BOTTOM)):
        for (word, _), x in zip(words, xs, strict=True):
            lines.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{escape(word)}</text>')
    title = f'Which English words each German word attends to: {SENTENCE} {translation}'
    svg = (f'<svg class="attention-picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 206" role="img">\n'
           f'<title>{escape(title)}</title>\n<style>{STYLE}</style>\n' + '\n'.join(lines) + '\n</svg>\n')
    (Path(__file__).parent / 'images' / 'attention.svg').write_text(svg, encoding='utf-8')


if __name__ == '__main__':
    main()
