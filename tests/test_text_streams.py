"Lines of any kind, in any number, on their way into a model."
import warnings

import pytest

from annotated_transformer.text_streams import InputReport, buffered, length_groups, to_text


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
    (b'a\0b\0', 'NUL character'), (None, 'expected text, got NoneType'), (7, 'got int')])
def test_other_things_do_not(item, problem):
    with pytest.raises(ValueError, match=problem):
        to_text(item)


def test_the_report_counts_and_warns_once():
    report = InputReport(max_tokens=3, what='titles')
    assert [report.read(item) for item in ('a', None, 'b', b'\xff')] == ['a', '', 'b', '']
    assert report.truncate([[5] * 2, [5] * 4, [5] * 3]) == [[5] * 2, [5] * 3, [5] * 3]
    assert report.truncate([[6] * 9]) == [[6] * 3]
    with pytest.warns(UserWarning) as caught:
        report.warn()
    truncated, unreadable = [str(w.message) for w in caught]
    assert truncated.startswith('2 of 4 titles were truncated to 3 tokens')
    assert 'the first is number 2, the longest has 9 tokens' in truncated
    assert unreadable.startswith('2 of 4 lines could not be read') and 'line 2: expected text' in unreadable


def test_a_report_without_problems_is_silent():
    report = InputReport(max_tokens=3)
    report.read('a')
    report.truncate([[1, 2, 3]])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        report.warn()


def test_a_strict_report_names_the_line():
    report = InputReport(max_tokens=3, strict=True)
    report.read('a')
    with pytest.raises(ValueError, match='line 2: not UTF-8'):
        report.read(b'\xff')
