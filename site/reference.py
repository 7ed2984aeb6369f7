"""The API reference, read from the source of the package: signatures, and docstrings with their `:param` fields.

The package is not imported, so the site needs no PyTorch. One reStructuredText file for each module; Sphinx itself
understands the fields, and `names` in backticks become links.
"""
import ast
import re

from project import BY_MODULE, CFG, PACKAGE

PACKAGE_NAME = CFG['lib_name']


class Reference:
    "All public names of the package, by module."
    def __init__(self):
        self.modules = {}
        for path in sorted(PACKAGE.glob('*.py')):
            if not path.stem.startswith('_'):
                self.modules[path.stem] = public_nodes(ast.parse(path.read_text(encoding='utf-8')))
        owners = {}
        for module, nodes in self.modules.items():
            for name in nodes:
                owners.setdefault(name, []).append(f'{PACKAGE_NAME}.{module}.{name}')
        self.methods = {f'{PACKAGE_NAME}.{module}.{name}': public_methods(node)
                        for module, nodes in self.modules.items() for name, node in nodes.items()
                        if isinstance(node, ast.ClassDef)}
        self.unique = {name: full[0] for name, full in owners.items() if len(full) == 1}

    def names(self, module):
        return list(self.modules.get(module, {}))

    def address(self, full_name):
        return f'api/{full_name.split(".")[1]}.html#{full_name}'

    def write(self, folder):
        "Write a page for each module, and one that lists them."
        order = [page['module'] for page in BY_MODULE.values()]
        order += [module for module in self.modules if module not in order and self.modules[module]]
        order = [module for module in order if self.modules.get(module)]
        for module in order:
            (folder / f'{module}.rst').write_text(self.module_page(module), encoding='utf-8')
        (folder / 'index.rst').write_text(self.index(order), encoding='utf-8')

    def module_page(self, module):
        page = BY_MODULE.get(module)
        title = f'Module {module}'
        text = f'{title}\n{"=" * len(title)}\n\n.. py:module:: {PACKAGE_NAME}.{module}\n\n'
        if page:
            text += f'.. container:: promise\n\n   {escaped(page["promise"])}.\n\n'
            page_title = page['title'].replace('`', '')
            link = f':doc:`Page {page["number"]:02}, {page_title} </{page["stem"]}>`'
            text += f'{link}, explains this module and exports it.\n\n'
        names = ', '.join(list(self.modules[module])[:3])
        text += f'.. code-block:: python\n\n   from {PACKAGE_NAME}.{module} import {names}\n\n'
        for name, node in self.modules[module].items():
            text += entry(name, node, module, page)
        return text

    def index(self, order):
        text = 'Reference\n=========\n\nEvery public name of the package, in the order of the pages.\n\n'
        for module in order:
            text += f':doc:`{module}`\n{"-" * (len(module) + 7)}\n\n'
            if module in BY_MODULE:
                text += f'{escaped(BY_MODULE[module]["promise"])}.\n\n'
            text += '.. list-table::\n   :class: names\n\n'
            for name, node in self.modules[module].items():
                summary = escaped(first_sentence(node)) or '\\'
                text += f'   * - :py:obj:`{name} <{PACKAGE_NAME}.{module}.{name}>`\n     - {summary}\n'
            text += '\n'
        return text + '.. toctree::\n   :hidden:\n\n' + ''.join(f'   {module} <{module}>\n' for module in order)


def public_nodes(tree):
    "The definitions of the names in `__all__`, in its order, but for those that are not at the top level."
    defined = {}
    public = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in [found for target in targets for found in ast.walk(target) if isinstance(found, ast.Name)]:
                defined[name.id] = node
                if name.id == '__all__':
                    public = ast.literal_eval(node.value)
    return {name: defined[name] for name in public if name in defined}


def docstring(node):
    return (ast.get_docstring(node) or '') if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else ''


def first_sentence(node):
    text = docstring(node).split('\n\n')[0].replace('\n', ' ')
    return re.split(r'(?<=[.]) (?=[A-Z])', text)[0]


def escaped(text):
    "Text in which only `names` and ``code`` are markup."
    parts = re.split(r'(``[^`]*``|`[^`\n]*`)', text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.sub(r'([*|\\])', r'\\\1', re.sub(r'(?<=\w)_(?!\w)', r'\\_', part))
        elif not re.fullmatch(r'`[A-Za-z_][\w.]*`', part) and not part.startswith('``'):
            parts[i] = f'`{part}`'
    return ''.join(parts)


def body(text):
    "A docstring as reStructuredText: its fields stay fields."
    lines = []
    for line in text.splitlines():
        field = re.match(r'(:(?:param \**\w+|return|raises? \w+):)(.*)', line)
        lines.append(field[1].replace('*', r'\*') + escaped(field[2]) if field else escaped(line))
    return '\n'.join(lines)


def indented(text, columns):
    return '\n'.join(' ' * columns + line if line.strip() else '' for line in text.splitlines())


def signature(node, method=False):
    "Parameters, types, defaults and result as one line."
    arguments = node.args
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    first = [*arguments.posonlyargs, *arguments.args][:1]
    if method and first and 'staticmethod' not in decorators:
        (arguments.posonlyargs or arguments.args).pop(0)
    result = f' -> {ast.unparse(node.returns)}' if node.returns else ''
    return f'({ast.unparse(arguments)}){result}'


def is_dataclass(node):
    return any('dataclass' in ast.unparse(decorator) for decorator in node.decorator_list)


def class_signature(node):
    "What a class is called with: the fields of a dataclass or a named tuple, or the parameters of __init__."
    if is_dataclass(node) or any(ast.unparse(base) == 'NamedTuple' for base in node.bases):
        fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
        return '(' + ', '.join(
            f'{ast.unparse(field.target)}: {ast.unparse(field.annotation)}'
            + (f' = {short(ast.unparse(field.value))}' if field.value else '') for field in fields) + ')'
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == '__init__':
            return signature(child, method=True).removesuffix(' -> None')
    return ''


def short(value, limit=60):
    return value if len(value) <= limit else '...'


def sources(node, module, page):
    "Where a name is explained (a function or class: its cell), and where its code stands."
    address = f'{CFG["blob"]}/{PACKAGE_NAME}/{module}.py#L{node.lineno}-L{node.end_lineno}'
    links = [f'`Source <{address}>`__']
    if page:
        title = page['title'].replace('`', '')
        place = f'#def-{node.name}' if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else ''
        links.insert(0, f'`Page {page["number"]:02}, {title} <../{page["stem"]}.html{place}>`__')
    return '.. container:: sources\n\n   ' + ' · '.join(links) + '\n'


def entry(name, node, module, page):
    "One name as a directive of Sphinx's Python domain."
    if isinstance(node, ast.FunctionDef):
        text = f'.. py:function:: {name}{signature(node)}\n\n{indented(body(docstring(node)), 3)}\n\n'
        return text + indented(sources(node, module, page), 3) + '\n\n'
    if isinstance(node, ast.ClassDef):
        text = f'.. py:class:: {name}{class_signature(node)}\n\n'
        bases = [ast.unparse(base) for base in node.bases]
        if bases:
            text += '   .. container:: sources\n\n      Extends ' + ', '.join(f'``{base}``' for base in bases) + '\n\n'
        text += indented(body(docstring(node)), 3) + '\n\n' + indented(sources(node, module, page), 3) + '\n\n'
        return text + ''.join(map(method, public_methods(node).values()))
    value = short(ast.unparse(node.value)) if node.value is not None else '...'
    text = f'.. py:data:: {name}\n   :value: {value}\n\n'
    return text + indented(sources(node, module, page), 3) + '\n\n'


def public_methods(node):
    "The methods and properties of a class that the reference describes, by name."
    return {child.name: child for child in node.body
            if isinstance(child, ast.FunctionDef) and not child.name.startswith('_') and not is_overload(child)}


def is_overload(node):
    return any(ast.unparse(decorator).endswith('overload') for decorator in node.decorator_list)


def method(node):
    "A public method, property or class method."
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(decorator.endswith('property') for decorator in decorators):
        kind, call = 'property', ''
    else:
        kind, call = 'method', signature(node, method=True)
    options = ''.join(f'      :{name}:\n' for name in ('classmethod', 'staticmethod') if name in decorators)
    return f'   .. py:{kind}:: {node.name}{call}\n{options}\n{indented(body(docstring(node)), 6)}\n\n'
