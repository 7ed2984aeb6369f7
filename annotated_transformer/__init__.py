"""“Attention Is All You Need” as executable pages, and the translation library that they export.

Start at `v1.translator.Translator`.
"""
__version__ = '0.1.0'
