"""Notebooks, as they are stored, to pages that Sphinx can read. Nothing is executed or imported.

Cells marked `#| hide` are left out, cells marked `hide-input` or `solution` are folded, exported cells say where they
go, and names of the library and terms of the glossary become links.
"""
import ast
import html
import re

import nbformat
from nbformat.v4 import new_markdown_cell

from project import CFG, NBS, PAGES, repository_links

DIRECTIVE = re.compile(r'^\s*#\s*\|\s*([\w-]+)(?::?\s+(.*?))?\s*$')
BADGE = re.compile(r'^\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)\s*\n*')
# Text in which nothing is linked: code, formulas, links, headings.
PLAIN = re.compile(r'(```.*?```|\$\$.*?\$\$|\$[^$\n]+\$|\[[^\]]*\]\([^)]*\)|^[#>][^\n]*$)', re.S | re.M)
LONG_LINE = 150
LONG_OUTPUT = 30                # lines; longer outputs scroll
WORDS_PER_MINUTE = 200
CODE_LINES_PER_MINUTE = 16
KERNEL = {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'}


def directives(source):
    "The `#|` lines of a cell as a dictionary, and the source without them."
    kept = []
    found = {}
    for line in source.splitlines():
        match = DIRECTIVE.match(line)
        if match:
            found[match[1]] = match[2] or True
        else:
            kept.append(line)
    return found, '\n'.join(kept).strip('\n')


def parse(source):
    "The syntax tree of a cell, whose lines for IPython are skipped."
    try:
        return ast.parse(re.sub(r'^(\s*)[%!].*$', r'\1pass', source, flags=re.M))
    except SyntaxError:
        return ast.parse('')


def picture_text(source, heading):
    "A text for a cell's pictures: what the functions that draw them are told."
    words = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            words += [a.value for a in arguments if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    words = [word.replace('\n', ' ') for word in words if re.search(r'[A-Za-z]{4}', word)]
    return f'{heading}: ' + ', '.join(dict.fromkeys(words)) if words else f'Figure: {heading}'


def code_names(cells, module, reference):
    "Names in a page's code that are the library's and nothing else's, with their full names."
    package = CFG['lib_name']
    found = {name: f'{package}.{module}.{name}' for name in reference.names(module)}
    local = set()
    for cell in cells:
        if cell.cell_type != 'code':
            continue
        for node in ast.walk(parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and (node.module or '').startswith(f'{package}.'):
                known = reference.names(node.module.split('.')[1])
                names = known if node.names[0].name == '*' else [a.name for a in node.names if not a.asname]
                found |= {name: f'{node.module}.{name}' for name in names if name in known}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                local.add(node.id)
            elif isinstance(node, ast.arg):
                local.add(node.arg)
    return {name: full for name, full in found.items() if name not in local}


# Words that stand for a command as well as for a function, or for a part of a corpus.
COMMANDS = {'train', 'serve', 'prepare', 'evaluate'}
NAME = r'[A-Za-z_]\w*'


class Names:
    "What a name in the prose of a page means: its own and imported names, and other names of the library."
    def __init__(self, on_page, reference, module=''):
        self.on_page = on_page
        self.reference = reference
        self.known = reference.unique | on_page
        self.own_classes = [f'{CFG["lib_name"]}.{module}.{name}' for name in reference.names(module)]
        self.owns_commands = 'command' not in module
        self.module = module

    def is_own(self, name):
        return self.on_page.get(name) == f'{CFG["lib_name"]}.{self.module}.{name}'

    def plain(self, name):
        "`name`: in lower case, only if the page's code knows it; else it may be an ordinary word."
        if re.search('[_A-Z]', name):
            return self.known.get(name)
        if name in COMMANDS and not (self.is_own(name) and self.owns_commands):
            return None
        return self.on_page.get(name)

    def called(self, name):
        "`name(...)`: a function, or a method of a class that the page exports."
        owners = [full for full in self.own_classes if name in self.reference.methods.get(full, {})]
        if len(owners) == 1 and not self.is_own(name):
            return f'{owners[0]}.{name}'
        return self.known.get(name) if re.search('[_A-Z]', name) else self.on_page.get(name)

    def dotted(self, first, last):
        "`Class.method`, `module.name`, or a method of an object that is named like its class (translator.translate)."
        if last in self.reference.modules.get(first, {}):
            return f'{CFG["lib_name"]}.{first}.{last}'
        owner = self.known.get(first)
        if owner in self.reference.methods:
            return f'{owner}.{last}' if last in self.reference.methods[owner] else owner
        owner = self.known.get(first.capitalize())
        if first.islower() and last in self.reference.methods.get(owner, {}):
            return f'{owner}.{last}'
        return None

    def target(self, code):
        "The full name of what a piece of code names; None if that is not clear."
        if re.fullmatch(NAME, code):
            return self.plain(code)
        call = re.fullmatch(rf'({NAME})\(.*\)', code)
        if call:
            return self.called(call[1])
        dots = re.fullmatch(rf'(?:{CFG["lib_name"]}\.)?({NAME})\.({NAME})(?:\(.*\))?', code)
        return self.dotted(dots[1], dots[2]) if dots else None


class Prose:
    "Links from the prose of one page: names of the library to the reference, terms to the glossary."
    def __init__(self, text, names, terms):
        self.names = names
        self.seen = set()
        defined = {word.lower() for word in re.findall(r'\*\*([^*\n]+)\*\*', text)}
        self.terms = {term: entry for term, entry in terms.items() if not defined & set(entry['forms'])}
        forms = [form for entry in self.terms.values() for form in entry['forms']]
        longest_first = '|'.join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
        self.pattern = re.compile(rf'(`[^`\n]*`|\*[^*\n]+\*)|(?<![\w-])({longest_first})(?![\w-])', re.I)
        self.term_of = {form: term for term, entry in self.terms.items() for form in entry['forms']}

    def name_link(self, match):
        code = match[2]
        target = self.names.target(code)
        if not target or target in self.seen:
            return match[0]
        self.seen.add(target)
        return f'{match[1]}{{py:obj}}`{code} <{target}>`'

    def term_link(self, match):
        if match[1]:
            return match[0]
        term = self.term_of[match[2].lower()]
        if term in self.seen:
            return match[0]
        self.seen.add(term)
        return f'{{term}}`{match[2]} <{term}>`'

    def linked(self, text):
        parts = PLAIN.split(text)
        for i in range(0, len(parts), 2):
            parts[i] = self.pattern.sub(self.term_link, parts[i]) if self.terms else parts[i]
            parts[i] = re.sub(r'(^|[\s(,;])`([^`\n<>|]+)`', self.name_link, parts[i])
        return ''.join(parts)


def shown_outputs(outputs):
    "The outputs worth showing, and tags for those that are long."
    kept = []
    tags = set()
    for output in outputs:
        data = output.get('data', {})
        if 'application/vnd.jupyter.widget-view+json' in data:
            continue
        if 'image/png' in data:
            data.pop('text/plain', None)
        elif 'text/markdown' in data:
            data['text/markdown'] = repository_links(data['text/markdown'])
        lines = (output.get('text') or data.get('text/plain') or '').splitlines()
        if lines and max(map(len, lines)) > LONG_LINE:
            tags.add('wrap-output')
        if len(lines) > LONG_OUTPUT:
            tags.add('scroll-output')
        kept.append(output)
    return kept, tags


def export_label(source, module):
    "A line above an exported cell: the names that it adds to the module, with links to the reference."
    tree = parse(source)
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    names = [name for name in names if not name.startswith('_')]
    if not names:
        return None
    address = f"api/{module}.html#{CFG['lib_name']}.{module}"
    links = ' '.join(f'<a id="def-{name}" href="{address}.{name}">{name}</a>' for name in names)
    label = f'<span>{CFG["lib_name"]}.{module}</span>'
    text = f'<div class="exported">{label}{links}</div>'
    return new_markdown_cell(f'```{{raw}} html\n{text}\n```')


def reading_minutes(cells):
    "An estimate for a first reading: the prose, and the code that is not folded."
    words = 0
    lines = 0
    for cell in cells:
        if cell.cell_type == 'markdown':
            prose = re.sub(r'\]\([^)]*\)|```.*?```', '', cell.source, flags=re.S)
            words += len(re.findall(r"[A-Za-z][\w'’-]*", prose))
        elif not set(cell.metadata.get('tags', [])) & {'hide-input', 'hide-cell'}:
            lines += sum(1 for line in cell.source.splitlines() if line.strip())
    return max(1, round(words / WORDS_PER_MINUTE + lines / CODE_LINES_PER_MINUTE))


def masthead(page, minutes, view):
    "What stands below a page's promise: its part, how long it takes, where else it can be opened, its live view."
    path = f'nbs/{page["stem"]}.ipynb'
    items = [f'<span>{page["group"].split(":")[0]}, page {page["number"]:02}</span>',
             f'<span>about {minutes} minutes</span>',
             f'<a href="{CFG["colab"]}/{path}">Open in Colab</a>',
             f'<a href="{CFG["edit"]}/{path}">Edit this page</a>']
    if page['module']:
        items.append(f'<a href="api/{page["module"]}.html">Reference: {page["module"]}</a>')
    facts = f'<p class="page-facts">{" ".join(items)}</p>'
    if view:
        address, words = view
        address = html.escape(address)
        facts += (f'<details class="live-view" data-address="{address}"><summary>See it live: {words}</summary>'
                  f'<p><a href="{address}">Open this view by itself</a></p></details>')
    return f'```{{raw}} html\n{facts}\n```'


def code_cell(cell, page, heading):
    "One code cell as the site shows it, after a label if it is exported; nothing for hidden ones."
    flags, source = directives(cell.source)
    if 'hide' in flags or not source.strip():
        return []
    tags = set(cell.metadata.get('tags', []))
    cell.outputs, shown = shown_outputs(cell.outputs)
    cell.source = source
    mystnb = {}
    if 'solution' in tags:
        shown |= {'solution', 'hide-cell' if cell.outputs else 'hide-input'}
        mystnb |= {'code_prompt_show': 'Show the solution', 'code_prompt_hide': 'Hide the solution'}
    elif 'hide-input' in tags or flags.get('echo') == 'false':
        shown |= {'hide-input'}
        what = 'the code of this figure' if any('image/png' in o.get('data', {}) for o in cell.outputs) else 'the code'
        mystnb |= {'code_prompt_show': f'Show {what}', 'code_prompt_hide': f'Hide {what}'}
    label = None
    if 'export' in flags or 'exporti' in flags:
        shown.add('exports')
        label = export_label(source, page['module']) if 'export' in flags else None
    if any('image/png' in output.get('data', {}) for output in cell.outputs):
        mystnb['image'] = {'alt': picture_text(source, heading)}
    cell.metadata = nbformat.NotebookNode()
    if shown:
        cell.metadata['tags'] = sorted(shown)
    if mystnb:
        cell.metadata['mystnb'] = mystnb
    return [label, cell] if label else [cell]


def convert(stem, target, reference, terms, view=None):
    "Write one page as Sphinx shall read it; return the names of its code, with their addresses."
    page = PAGES[stem]
    notebook = nbformat.read(NBS / f'{stem}.ipynb', 4)
    names = code_names(notebook.cells, page['module'], reference)
    text = '\n'.join(cell.source for cell in notebook.cells if cell.cell_type == 'markdown')
    prose = Prose(text, Names(names, reference, page['module']), terms)
    cells = []
    title = None
    heading = page['title']
    for cell in notebook.cells:
        if cell.cell_type == 'code':
            cells += code_cell(cell, page, heading)
            continue
        text = BADGE.sub('', cell.source)
        headings = re.findall(r'^#+ (.+)', text, re.M)
        heading = headings[-1].replace('`', '') if headings else heading
        cell.source = prose.linked(repository_links(text))
        if title is None and headings:
            title = cell
        cells.append(cell)
    facts = masthead(page, reading_minutes(cells), view)
    title.source = re.sub(r'^> .+$', lambda promise: f'{{.promise}}\n{promise[0]}\n\n{facts}', title.source,
                          count=1, flags=re.M)
    notebook.cells = cells
    notebook.metadata = nbformat.NotebookNode(kernelspec=KERNEL, mystnb={'merge_streams': True})
    nbformat.write(notebook, target / f'{stem}.ipynb')
    return {name: reference.address(full) for name, full in names.items()}


