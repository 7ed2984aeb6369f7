"""“Attention Is All You Need” as executable pages, and the translation library that they export.

Start at `annotated_transformer.translator.Translator`.
"""
__version__ = '0.2.0'
