"""Make the finished pages light: one style sheet with the rules that are used, scripts that do not block, sized images.

PurgeCSS (npm) decides which rules are used, from all pages and scripts of the site. The icons' fonts keep the icons
that these rules name.
"""
import hashlib
import json
import posixpath
import re
import subprocess

import imagesize
from fontTools import subset

from project import SITE

PURGE = SITE / 'build/node_modules/.bin/purgecss'
NESTED = re.compile(r'(?<=[{};/])\s*([^{};/]*:(?:is|where|has)\([^{};]*\{)') # PurgeCSS misreads these rules
SHEET = re.compile(r'[ \t]*<link\b[^>]*\bhref="((?:\.\./)*_static/[^"]+\.css)(?:\?[^"]*)?"[^>]*>\n?')
OPTIONS = re.compile(r'<script src="[^"]*documentation_options\.js[^"]*"></script>')
BLOCKING = re.compile(r'<script (?=src="[^"]*_static/)(?![^>]*\bdefer\b)')
IMPORT = re.compile(r'@import (?:url\()?["\']?([^"\')]+)["\']?\)?;')
IMAGE = re.compile(r'<img\b(?![^>]*\bwidth=)([^>]*\bsrc="([^":]+)"[^>]*?)\s*/?>')
ICON = re.compile(r'--fa:"\\(f[0-9a-f]{3})"')
# PurgeCSS's settings. Scripts put some classes together: states of Bootstrap and of the theme, colors of code.
SETTINGS = """module.exports = {
  content: %s,
  css: [%s],
  safelist: {standard: [/^(show|active|collapsing|fade|open)$/],
             greedy: [/tooltip|popover|pst-|data-theme|data-mode|scrolled|copybtn/]},
};
"""


def joined(folder, names):
    "Style sheets of the site as one, for the folder `_static`; addresses in them are adapted."
    parts = []
    for name in names:
        text = (folder / name).read_text(encoding='utf-8')
        where = posixpath.dirname(name)

        def adapted(match, where=where):
            quote, address = match[1], match[2]
            if address.startswith(('data:', '#', 'http')):
                return match[0]
            return f'url({quote}{posixpath.relpath(posixpath.join(where, address), "_static")}{quote})'
        text = IMPORT.sub(lambda match, where=where: joined(folder, [posixpath.join(where, match[1])]), text)
        text = NESTED.sub(r'\1/* purgecss ignore current */', text)
        parts.append(re.sub(r'url\((["\']?)([^)"\']+)\1\)', adapted, text))
    return '\n'.join(parts)


def purged(folder, css):
    "The rules of a style sheet that some page or script of the site can use."
    sheet = SITE / 'build/joined.css'
    sheet.write_text(css, encoding='utf-8')
    content = [str(folder / pattern) for pattern in ('**/*.html', '_static/**/*.js')]
    config = SITE / 'build/purgecss.config.cjs'
    config.write_text(SETTINGS % (json.dumps(content), json.dumps(str(sheet))), encoding='utf-8')
    done = subprocess.run([PURGE, '--config', config], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)[0]['css']


def sized(match, folder, page):
    "An image with its width and height, loaded when it comes into sight."
    attributes, address = match[1], match[2]
    path = page.parent / address
    width, height = imagesize.get(path) if path.is_file() else (-1, -1)
    size = f' width="{width}" height="{height}"' if width > 0 else ''
    return f'<img{attributes}{size} loading="lazy">'


def keep_icons(folder, css):
    "The icons' fonts with those icons only that a style sheet names."
    options = subset.Options(flavor='woff2')
    for path in (folder / '_static/vendor/fontawesome/webfonts').glob('*.woff2'):
        font = subset.load_font(path, options)
        icons = subset.Subsetter(options)
        icons.populate(unicodes=[int(code, 16) for code in ICON.findall(css)])
        icons.subset(font)
        subset.save_font(font, path, options)


def lighten(folder):
    "Change all pages of a folder."
    pages = {page: page.read_text(encoding='utf-8') for page in folder.rglob('*.html')}
    options = (folder / '_static/documentation_options.js').read_text(encoding='utf-8')
    sheets = {}
    rules = ''
    for page, text in pages.items():
        up = '../' * (len(page.relative_to(folder).parts) - 1)
        found = list(SHEET.finditer(text))
        if found:
            names = tuple(dict.fromkeys(match[1].removeprefix(up) for match in found))
            if names not in sheets:
                css = purged(folder, joined(folder, names))
                rules += css
                sheets[names] = f'_static/site-{hashlib.sha256(css.encode()).hexdigest()[:12]}.css'
                (folder / sheets[names]).write_text(css, encoding='utf-8')
            first = found[0].start()
            rest = SHEET.sub('', text[first:])
            text = f'{text[:first]}<link rel="stylesheet" href="{up}{sheets[names]}">\n{rest}'
        text = OPTIONS.sub(lambda _: f'<script>{options}</script>', text)
        if page.name != 'search.html': # its script calls what the others define
            text = BLOCKING.sub('<script defer ', text)
        text = IMAGE.sub(lambda match: sized(match, folder, page), text)
        page.write_text(text, encoding='utf-8')
    keep_icons(folder, rules)
