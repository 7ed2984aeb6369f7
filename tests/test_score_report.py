"The report of an evaluation: its figures, its text and its plot."
import importlib.util
import json

import pytest

from annotated_transformer import score_report
from annotated_transformer.score_report import (ERROR_TYPES, describe, error_types, german_words,
                                                look_up, lowercased_tokenized, phenomenon_scores, phrase_at, phrase_readings,
                                                plot_report, report, save_plot, tokenized_bleu)
from annotated_transformer.scoring import score
from annotated_transformer.toy_languages import toy_ende

REFERENCES = [f'Der {noun} {verb} heute, und {pronoun} nicht .'
              for noun in ('Hund', 'Mann') for verb in ('schläft', 'isst') for pronoun in ('sie', 'er', 'es')] * 3
OURS = [text if i % 3 else text.lower() for i, text in enumerate(REFERENCES)]
THEIRS = [text.replace('heute', '') for text in REFERENCES]


def test_the_number_of_sentences_comes_first():
    found = report(OURS, REFERENCES, 'de', samples=0)
    assert next(iter(found)) == 'sentences' and found['sentences'] == 36
    assert describe('ours', found).splitlines()[0] == 'ours: 36 sentences'
    assert describe('one', report(OURS[:1], REFERENCES[:1], 'de', samples=0)).startswith('one: 1 sentence\n')


def test_figures_are_those_of_scoring_and_can_be_saved_as_json():
    found = report(OURS, REFERENCES, 'de', samples=50, against=THEIRS)
    assert found['bleu'] == score(OURS, REFERENCES).bleu
    assert found['against_bleu'] == score(THEIRS, REFERENCES).bleu
    assert 0 < found['p_value'] <= 1
    assert sum(part['sentences'] for part in found['by_length'].values()) == 36
    assert json.loads(json.dumps(found)) == found


def test_lowercasing_forgives_capitals():
    assert report(OURS, REFERENCES, 'de', 0)['lowercased_tokenized_bleu'] == pytest.approx(100)


def test_references_that_are_tokenized_already():
    tokenized = [text.replace('heute', 'jetzt') for text in lowercased_tokenized(REFERENCES, 'de')]
    found = report(OURS, REFERENCES, 'de', 0, tokenized_references=tokenized)
    assert found['lowercased_tokenized_bleu'] == tokenized_bleu(lowercased_tokenized(OURS, 'de'), tokenized)[0]
    assert found['lowercased_tokenized_bleu'] < found['bleu']


def test_without_samples_there_is_no_interval():
    text = describe('ours', report(OURS, REFERENCES, 'de', 0, against=THEIRS))
    assert 'the other system' in text and 'p =' not in text and 'interval' not in text
    with pytest.raises(ValueError, match='samples=3'):
        report(OURS, REFERENCES, 'de', 3)


def test_without_sacremoses_one_figure_is_missing(monkeypatch):
    monkeypatch.setattr(score_report, 'find_spec', lambda name: None)
    found = report(OURS, REFERENCES, 'de', 0)
    assert 'lowercased_tokenized_bleu' not in found and 'lowercase' not in describe('ours', found)


def test_toy_sentences_are_grouped_by_phenomenon(tmp_path):
    references = [pair.tgt for pair in toy_ende('val')]
    translations = [text if ' nicht' not in text else 'Nein.' for text in references]
    groups = phenomenon_scores('val', translations)
    found = report(translations, references, 'de', 0, by_phenomenon=groups)
    assert found['by_phenomenon']['nicht']['bleu'] < 1 < 50 < found['by_phenomenon']['kein']['bleu']
    assert 'by phenomenon:' in describe('val', found)
    assert [len(ax.patches) for ax in plot_report('val', found).axes] == [len(found['by_length']), len(groups)]
    save_plot(tmp_path / 'a.svg', 'val', found)
    assert '<svg' in (tmp_path / 'a.svg').read_text()


def test_plots_say_what_they_need(monkeypatch):
    monkeypatch.setattr(score_report, 'find_spec', lambda name: None if name == 'matplotlib' else importlib.util.find_spec(name))
    with pytest.raises(ImportError, match=r'annotated_transformer\[plot\]'):
        plot_report('ours', {'by_length': {}})


def test_the_grammar_reads_every_noun_phrase_of_its_references():
    for pair in toy_ende('val'):
        words = german_words(pair.tgt)
        for i, word in enumerate(words):
            if look_up(word).part == 'noun':
                assert phrase_readings(phrase_at(words, i)), pair.tgt


def test_phrases_that_do_not_agree_have_no_reading():
    assert phrase_readings('einem Wald') == {('dative', 'singular')}
    assert phrase_readings('einen Wald') == {('accusative', 'singular')}
    for phrase in ('warme Tee', 'zwei Katze', 'jede Hunde', 'das kaltes Wasser', 'Katze Hund Maus'):
        assert not phrase_readings(phrase), phrase


def test_one_wrong_word_is_one_error_type():
    for pair in toy_ende('val'):
        assert error_types(pair.tgt, pair.tgt) == set()
        words = german_words(pair.tgt)
        nouns = [word for word in words if look_up(word).part == 'noun']
        if len(nouns) == 1:
            assert error_types(pair.tgt.replace(nouns[0], 'Xyz'), pair.tgt) >= {'wrong word'}
        if 'nicht' in words:
            assert error_types(pair.tgt.replace(' nicht', ''), pair.tgt) == {'negation'}
        assert error_types(pair.tgt[:-1], pair.tgt) == {'word dropped'}


def test_agreement_with_a_wrong_word_is_no_second_error():
    assert error_types('Er sieht ein kleines Kind.', 'Er sieht einen kleinen Hund.') == {'wrong word'}
    assert error_types('Er sieht einen kleines Kind.', 'Er sieht einen kleinen Hund.') == {'wrong word', 'agreement'}


def test_other_texts_do_not_fail():
    for text in ('', '.', 'kein nicht nie', 'Ein Zug', 'the cat'):
        assert error_types(text, 'Ein Hund schläft.') <= set(ERROR_TYPES)
