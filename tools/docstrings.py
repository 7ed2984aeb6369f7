"""Move the comments behind parameters and fields into docstrings, where `help` and editors find them.

A page documents a parameter by a comment behind it:

    def sinusoids(
        n: int,       # number of positions
        d_model: int, # features of a token, an even number
    ) -> Tensor: # one row for each position
        "Return the positional encodings of section 3.5."

The module that the page exports says the same in the docstring:

    def sinusoids(n: int, d_model: int) -> Tensor:
        \"\"\"Return the positional encodings of section 3.5.

        :param n: number of positions
        :param d_model: features of a token, an even number
        :return: one row for each position
        \"\"\"
"""
import ast
import io
import re
import textwrap
import tokenize

WIDTH = 118 # columns of a signature, and of a docstring


def documented(source, introduction):
    "The source of a module as nbdev exports it, with full docstrings, and one for the module."
    tree = ast.parse(source)
    module = Source(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            module.document_function(node)
        elif isinstance(node, ast.ClassDef):
            module.document_class(node)
    return finished(module.edited(), introduction)


def finished(source, introduction):
    "Leave out nbdev's marks between cells, which lead nowhere, and introduce the module."
    warning, _, rest = source.partition('\n')
    rest = re.sub(r'^# %% .*\n', '', rest, flags=re.M)
    rest = re.sub(r'\n{4,}', '\n\n\n', rest).lstrip('\n')
    lines = textwrap.wrap(f'"""{introduction}"""', WIDTH)
    return f'{warning}\n\n' + '\n'.join(lines) + f'\n\n{rest}'


class Source:
    "The text of a module, and what is to be changed in it."
    def __init__(self, text):
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.text = text
        self.comments = {} # by place in the text
        self.brackets = [] # (place, bracket)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            place = self.starts[token.start[0] - 1] + token.start[1]
            if token.type == tokenize.COMMENT:
                self.comments[place] = token.string.lstrip('# ')
            elif token.string in ('(', '[', '{', ')', ']', '}'):
                self.brackets.append((place, token.string))
        self.edits = [] # (start, end, new text)

    def position(self, line, column):
        "The place of a syntax node, which counts bytes, in the text."
        before = self.lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(before)

    def start(self, node):
        return self.position(node.lineno, node.col_offset)

    def end(self, node):
        return self.position(node.end_lineno, node.end_col_offset)

    def part(self, start, end):
        "A part of the text, without comments and on one line."
        return re.sub(r'\s*\n\s*', ' ', self.without_comments(start, end))

    def comment(self, start, end):
        "The comments in a part of the text, joined."
        return ' '.join(text for place, text in sorted(self.comments.items()) if start <= place < end)

    def edited(self):
        text = self.text
        for start, end, new in sorted(self.edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def document_function(self, node, is_documented_elsewhere=False):
        "Move a function's comments into its docstring, or return them for another one."
        has_docstring = ast.get_docstring(node) is not None
        if not has_docstring and not is_documented_elsewhere:
            return []
        parameters = self.parameters(node)
        body = self.starts[node.body[0].lineno - 1]
        ends = [start for _, _, start in parameters[1:]] # a comment belongs to the parameter before it
        result_from = self.end(node.returns) if node.returns else self.closing(node)
        texts = []
        for (name, _, start), end in zip(parameters, [*ends, result_from]):
            if text := self.comment(start, end):
                texts.append((f'param {name}', text))
        if text := self.comment(result_from, body):
            texts.append(('return', text))
        if texts:
            self.replace_signature(node, parameters, body)
        if texts and has_docstring:
            self.extend_docstring(node, texts)
        return [] if has_docstring else texts

    def closing(self, node):
        "The place of the bracket that closes a signature."
        depth = 0
        for place, bracket in self.brackets:
            if place < self.start(node):
                continue
            depth += 1 if bracket in '([{' else -1
            if depth == 0:
                return place

    def arguments(self, node):
        "Every argument of a function, in order, after its mark: *, ** or nothing."
        a = node.args
        found = [('', argument) for argument in a.posonlyargs + a.args]
        if a.vararg:
            found.append(('*', a.vararg))
        found += [('', argument) for argument in a.kwonlyargs]
        if a.kwarg:
            found.append(('**', a.kwarg))
        return found

    def parameters(self, node):
        "(name, text, start) of every parameter."
        arguments = self.arguments(node)
        starts = [self.start(argument) for _, argument in arguments]
        found = []
        for (mark, argument), start, end in zip(arguments, starts, [*starts[1:], self.closing(node)]):
            text = self.part(start, end).rstrip(' ,*/') # without the marks of the next parameter
            found.append((argument.arg, mark + text, start))
        return found

    def replace_signature(self, node, parameters, body):
        "Write a signature without comments, on as few lines as it needs."
        a = node.args
        texts = [text for _, text, _ in parameters]
        if a.kwonlyargs and not a.vararg:
            texts.insert(len(a.posonlyargs) + len(a.args), '*')
        if a.posonlyargs:
            texts.insert(len(a.posonlyargs), '/')
        returns = f' -> {self.part(self.start(node.returns), self.end(node.returns))}' if node.returns else ''
        indent = ' ' * node.col_offset
        opening = f'def {node.name}('
        line = f'{opening}{", ".join(texts)}){returns}:'
        if len(indent + line) > WIDTH:
            inner = indent + ' ' * 4
            rows = []
            for text in texts:
                if rows and len(f'{inner}{rows[-1]} {text},') <= WIDTH:
                    rows[-1] += f' {text},'
                else:
                    rows.append(f'{text},')
            line = opening + '\n' + ''.join(f'{inner}{row}\n' for row in rows) + f'{indent}){returns}:'
        self.edits.append((self.start(node), body, line + '\n'))

    def document_class(self, node):
        "Document a class: its fields, the parameters of an `__init__` without a docstring, and its methods."
        has_docstring = ast.get_docstring(node) is not None
        texts = []
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                texts += self.document_function(item, has_docstring and item.name == '__init__')
            elif isinstance(item, ast.AnnAssign) and has_docstring:
                start = self.start(item)
                end = self.starts[item.end_lineno]
                if text := self.comment(start, end):
                    texts.append((f'param {item.target.id}', text))
                    self.edits.append((start, end, self.without_comments(start, end)))
        if texts:
            self.extend_docstring(node, texts)

    def without_comments(self, start, end):
        text = self.text[start:end]
        for place in sorted(self.comments, reverse=True):
            if start <= place < end:
                line_end = text.index('\n', place - start)
                text = text[:place - start].rstrip(' ') + text[line_end:]
        return text

    def extend_docstring(self, node, texts):
        "Add the texts of parameters to the docstring of a function or a class."
        literal = node.body[0]
        new = docstring(ast.get_docstring(node), texts, ' ' * literal.col_offset)
        self.edits.append((self.start(literal), self.end(literal), new))


def docstring(summary, texts, indent):
    "A docstring: the summary, then one field for each parameter."
    lines = []
    for line in summary.splitlines():
        lines += textwrap.wrap(line, WIDTH - len(indent) - 3) or ['']
    if texts:
        lines.append('')
    for name, text in texts:
        wrapped = textwrap.wrap(f':{name}: {text}', WIDTH - len(indent), subsequent_indent='    ',
                                break_long_words=False, break_on_hyphens=False)
        lines += wrapped
    prefix = 'r' if '\\' in ''.join(lines) else ''
    if len(lines) == 1:
        return f'{prefix}"""{lines[0]}"""'
    rows = [indent + line if line else line for line in lines]
    return prefix + '"""' + '\n'.join(rows).removeprefix(indent) + f'\n{indent}"""'
