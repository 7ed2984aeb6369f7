"Settings of Sphinx. `site.json`, which build.py writes, brings what comes from settings.ini and from the pages."
import json
import re
import sys
from pathlib import Path

import sphinxcontrib.katex as katex

SITE = json.loads((Path(__file__).parent / 'build' / 'src' / 'site.json').read_text(encoding='utf-8'))
sys.path.insert(0, str(Path(__file__).parent))

project = 'annotated_transformer'
author = ''
copyright = SITE['copyright']
version = release = SITE['version']
html_title = project
html_baseurl = f"{SITE['doc_host']}{SITE['doc_baseurl']}/"
extensions = ['myst_nb', 'sphinx_copybutton', 'sphinxcontrib.katex']
default_role = 'py:obj'                     # `names` in docstrings
suppress_warnings = ['mystnb.unknown_mime_type']

# Pages: stored outputs, nothing executed, nothing fetched.
nb_execution_mode = 'off'
nb_merge_streams = True
nb_render_markdown_format = 'myst'          # otherwise tables in Markdown outputs stay text
nb_ipywidgets_js = {}                       # otherwise scripts from another server
myst_enable_extensions = ['dollarmath', 'amsmath', 'deflist', 'attrs_block', 'attrs_inline', 'colon_fence']
myst_heading_anchors = 3
myst_update_mathjax = False
smartquotes = False

# The reference
add_module_names = False
maximum_signature_line_length = 80
python_display_short_literal_types = True
toc_object_entries_show_parents = 'hide'

# Formulas become HTML when the site is built; their fonts lie beside the pages.
katex_prerender = True
katex_css_path = 'katex/katex.min.css'
katex.KATEX_DEFAULT_OPTIONS['throwOnError'] = True

copybutton_selector = 'div.cell_input div.highlight pre, div.highlight-sh pre, div.highlight-python pre'
copybutton_exclude = '.linenos, .gp, .go'

html_theme = 'sphinx_book_theme'
html_static_path = ['static', 'build/vendor']
html_favicon = 'images/icon.svg'
html_css_files = ['site.css']
html_js_files = [('search.js', {'defer': 'defer'}), ('site.js', {'defer': 'defer'})]
html_copy_source = False
html_use_index = False
html_domain_indices = False
html_show_sourcelink = False
html_last_updated_fmt = None
html_context = {'default_mode': 'auto'}
html_theme_options = {
    'repository_url': SITE['git_url'], 'repository_branch': SITE['branch'], 'use_repository_button': True,
    'use_issues_button': False, 'use_edit_page_button': False, 'use_download_button': False,
    'use_fullscreen_button': False,
    'show_navbar_depth': 1, 'show_toc_level': 2, 'max_navbar_depth': 2, 'home_page_in_toc': False,
    'search_bar_text': 'Search', 'navbar_start': [], 'navbar_center': [], 'navbar_end': [], 'navbar_persistent': [],
    'pygments_light_style': 'a11y-high-contrast-light', 'pygments_dark_style': 'github-dark',
    'logo': {'text': project}, 'extra_footer': SITE['footer'],
}

NAME = re.compile(r'<span class="(?:n|nc|nf)">([A-Za-z_]\w*)</span>')
CODE = re.compile(r'(?<=<div class="highlight-python notranslate"><div class="highlight">)<pre>.*?</pre>', re.S)
TERM = re.compile(r'<a class="reference internal" href="(?:\.\./)?glossary\.html#term-([^"]+)">'
                  r'<span class="xref std std-term">(.*?)</span></a>', re.S)
HEADING = re.compile(r'(<section id="([^"]+)"[^>]*>\s*(?:<span id="[^"]+"></span>\s*)*<h([1-4]))>')
SIGNATURE = re.compile(r'<dt [^>]*class="sig .*?</dt>', re.S)     # its parameters are a list without terms


def finish_page(app, pagename, templatename, context, doctree):
    "Link names in code, give terms their definitions, and describe the page to search engines."
    body = context.get('body')
    if not body:
        return
    names = SITE['names'].get(pagename, {})
    if names:
        def link(match):
            target = names.get(match[1])
            return f'<a class="code-link" href="{target}">{match[1]}</a>' if target else match[0]
        body = CODE.sub(lambda block: NAME.sub(link, block[0]), body)

    def term(match):
        definition = SITE['definitions'].get(match[1], '')
        return f'<a class="term" href="glossary.html#term-{match[1]}" data-definition="{definition}">{match[2]}</a>'
    body = TERM.sub(term, body)
    # For the search: headings with an address, definitions before mentions, prose before code, and the pages that
    # teach before those with details. Pagefind gives a heading the weight 8 less its level.
    share = 0.05 if pagename in SITE['details'] else 1

    def heading(match):
        weight = '' if share == 1 else f' data-pagefind-weight="{share * (8 - int(match[3])):.2f}"'
        return f'{match[1]} id="{match[2]}-heading"{weight}>'
    body = HEADING.sub(heading, body)
    body = body.replace('<div class="exported"', f'<div data-pagefind-weight="{8 * share}" class="exported"')
    body = body.replace('<span class="sig-name', f'<span data-pagefind-weight="{8 * share}" class="sig-name')
    body = body.replace('<div class="cell_input', f'<div data-pagefind-weight="{share / 2}" class="cell_input')
    if share < 1 or pagename.startswith('api/'):
        body = f'<div data-pagefind-weight="{share / 2}">{body}</div>'
    body = SIGNATURE.sub(lambda dt: re.sub(r'<(/?)d[ld]>', r'<\1div>', dt[0]), body)
    context['body'] = re.sub(r'(<strong>[^<]*</strong>) -- ', r'\1: ', body)       # parameters in the reference
    description = SITE['promises'].get(pagename, SITE['description'])
    context['metatags'] = context.get('metatags', '') + f'<meta name="description" content="{description}">'


def setup(app):
    app.connect('html-page-context', finish_page, priority=900)
