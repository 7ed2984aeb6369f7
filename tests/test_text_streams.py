"Lines of any kind, in any number, on their way into a model."
import warnings

import pytest

from annotated_transformer.text_streams import (
    FLUSH, InputReport, SentenceSplitter, buffered, length_groups, to_text, with_prefixes)


def test_groups_hold_similar_lengths_and_every_sentence_once():
    rows = [[9] * n for n in (3, 1, 8, 2, 3, 30, 1, 4)] # a row of one id is EOS alone: an empty sentence
    groups = length_groups(rows, max_tokens=12)
    assert [[len(rows[i]) for i in group] for group in groups] == [[30], [8], [4, 3, 3], [2]]
    assert sorted(i for group in groups for i in group) == [0, 2, 3, 4, 5, 7]
    assert length_groups([], 5) == length_groups([[9]], 5) == []


@pytest.mark.parametrize('size, expected', [(4, [4, 4, 2]), (1, [1] * 10), (20, [10])])
def test_buffers_hold_so_many_items(size, expected):
    assert [len(buffer) for buffer in buffered(zip(range(10)), size)] == expected


def test_long_texts_make_small_buffers():
    items = [('x' * n,) for n in (3, 3, 3, 20, 1, 9, 9)]
    buffers = list(buffered(iter(items), size=4, max_characters=10))
    assert [[len(text) for text, in buffer] for buffer in buffers] == [[3, 3, 3, 20], [1, 9], [9]]


def test_a_buffer_is_read_only_when_it_is_asked_for():
    source = iter(zip(range(10)))
    buffers = buffered(source, size=3)
    next(buffers)
    assert next(source) == (3,)


@pytest.mark.parametrize('item, expected', [
    ('a b\n', 'a b'), (b'stra\xc3\x9fe\r\n', 'straße'), ('\ufeffa', 'a'),
    (b'\xef\xbb\xbfa\n', 'a'), ('', ''), ('\0', '\0')])
def test_lines_become_text(item, expected):
    assert to_text(item) == expected


@pytest.mark.parametrize('item, problem', [
    (b'na\xefve', r'not UTF-8 \(invalid continuation byte at byte 2\)'),
    ('häuser'.encode('utf-16-le'), 'not UTF-8|NUL'),
    (b'a\0b\0', 'NUL character')])
def test_other_things_do_not(item, problem):
    with pytest.raises(ValueError, match=problem):
        to_text(item)


def check(report, rows, texts=None):
    "Check ids of texts; of the characters, those beyond ASCII and NUL are unknown."
    return report.check(texts or ['a'] * len(rows), rows, lambda text: [c for c in text if not 0 < ord(c) < 128], 3)


def test_what_no_file_can_contain_is_a_mistake_of_the_program():
    report = InputReport(max_tokens=3)
    report.read('a')
    with pytest.raises(TypeError, match='line 2: expected text, got NoneType'):
        report.read(None)


def test_the_report_counts_and_warns_once():
    report = InputReport(max_tokens=3, what='titles')
    assert [report.read(item) for item in ('a', b'\xfe', 'b', b'\xff')] == ['a', '', 'b', '']
    assert check(report, [[5] * 2, [5] * 4, [5] * 3]) == [[5] * 2, [5] * 3, [5] * 3]
    assert check(report, [[6] * 9]) == [[6] * 3]
    with pytest.warns(UserWarning) as caught:
        report.warn()
    truncated, unreadable = [str(w.message) for w in caught]
    assert truncated.startswith('truncated to 3 tokens')
    assert '2 of 4 titles (number 2, 4; ' in truncated and 'the longest has 9 tokens' in truncated
    assert unreadable.startswith('2 of 4 lines could not be read') and 'line 2: not UTF-8' in unreadable


def test_a_report_without_problems_is_silent():
    report = InputReport(max_tokens=3)
    report.read('a')
    check(report, [[1, 2, 4]], ['  a line, and its end\r\n'])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        report.warn()


def test_a_strict_report_names_the_line():
    report = InputReport(max_tokens=3, strict=True)
    report.read('a')
    with pytest.raises(ValueError, match='line 2: not UTF-8'):
        report.read(b'\xff')


def test_a_report_names_at_most_five_truncated_lines():
    report = InputReport(max_tokens=1)
    check(report, [[5, 5]] * 1000)
    with pytest.warns(UserWarning, match='1000 of 1000 sentences .number 1, 2, 3, 4, 5, ...; the longest has 2 tokens'):
        report.warn()
    assert len(report.truncated.first) == 5


@pytest.mark.parametrize('line_break', ['\n', '\r\n', '\r', '\n\n', '\x0b', '\x85', '\u2028', ' \n\t'])
def test_a_line_break_inside_a_text_is_noticed(line_break):
    report = InputReport(max_tokens=3)
    check(report, [[5]] * 3, ['A dog.', f'A dog.{line_break}A cat.', f'{line_break}A dog.{line_break}'])
    expected = 'line breaks are read as spaces: 1 of 3 sentences .number 2.. Translate each line by itself'
    with pytest.warns(UserWarning, match=expected):
        report.warn()


def test_unknown_characters_are_named_once():
    report = InputReport(max_tokens=9)
    check(report, [[5], [5, 3], [3], [3]], ['A dog.', 'A \N{SNOWMAN}.', '\N{SNOWMAN}\0', ''])
    with pytest.warns(UserWarning) as caught:
        report.warn()
    assert [str(w.message) for w in caught] == [
        'unknown to the tokenizer, and read as <unk>: \N{SNOWMAN} \\x00 in 3 of 4 sentences (number 2, 3, 4)']
    check(report, [[3]] * 9, [chr(0x4e00 + i) for i in range(9)])
    with pytest.warns(UserWarning, match='(?: \\S+){10} ... in 12 of 13 sentences .number 2, 3, 4, 5, 6, ...'):
        report.warn()


def test_prefixes_are_paired_one_for_one():
    assert list(with_prefixes('ab', None)) == [('a', None), ('b', None)]
    assert list(with_prefixes('ab', 'x')) == [('a', 'x'), ('b', 'x')]
    assert list(with_prefixes(iter('ab'), iter(['x', None]))) == [('a', 'x'), ('b', None)]
    for prefix, problem in (['x'], 'it has only 1'), (['x', 'y', 'z'], 'it has more than 2, the number of sentences'):
        pairs = with_prefixes('ab', prefix)
        assert next(pairs) == ('a', 'x')
        with pytest.raises(ValueError, match=f'one item for each sentence, but {problem}'):
            list(pairs)


def test_paragraphs_are_split_and_joined_line_by_line():
    splitter = SentenceSplitter('en')
    lines = ['Dr. Smith sleeps. The dog sees 3.5 cats! Does it?', '', '   ', FLUSH, b'One sentence', 'A.  B.']
    sentences = list(splitter.split(lines))
    assert sentences == ['Dr. Smith sleeps.', 'The dog sees 3.5 cats!', 'Does it?', '', '', FLUSH, 'One sentence',
                         'A.  B.']
    translations = [text.upper() for text in sentences if text is not FLUSH]
    assert list(splitter.join(translations)) == [
        'DR. SMITH SLEEPS. THE DOG SEES 3.5 CATS! DOES IT?', '', '', 'ONE SENTENCE', 'A.  B.']


def test_a_line_is_joined_as_soon_as_its_last_sentence_is_translated():
    splitter = SentenceSplitter('en')
    joined = splitter.join(splitter.split(['The cat sleeps. The dog sleeps.', 'The cow sleeps.']))
    assert next(joined) == 'The cat sleeps. The dog sleeps.'


def test_splitting_reports_unreadable_lines():
    with pytest.warns(UserWarning, match='1 of 2 lines could not be read'):
        assert list(SentenceSplitter('en').split(['The cat sleeps.', b'\xff'])) == ['The cat sleeps.', '']
    with pytest.raises(ValueError, match='line 2: not UTF-8'):
        list(SentenceSplitter('en', strict=True).split(['The cat sleeps.', b'\xff']))
