"Properties of the toy languages over tens of thousands of sentences, against tables written for this test alone."
import hashlib
import re
import subprocess
import sys
from collections import Counter

import jaxtyping
import pytest

from annotated_transformer.v1.toy_languages import LONGEST, PHENOMENA, SPLITS, ToyPair, copy_pairs, toy_ende, words

@pytest.fixture(scope='module')
def toy():
    jaxtyping.config.update('jaxtyping_disable', True)      # checking each of millions of small calls takes minutes
    try: return {split: toy_ende(split) for split in SPLITS}
    finally: jaxtyping.config.update('jaxtyping_disable', False)

@pytest.fixture(scope='module')
def everything(toy): return [pair for pairs in toy.values() for pair in pairs]

# What the test itself knows of German: gender and plural of every noun, and the endings.

NOUNS = '''
m Mann Männer, f Frau Frauen, n Kind Kinder, n Mädchen Mädchen, m Lehrer Lehrer, m Arzt Ärzte, m Freund Freunde,
m Bruder Brüder, f Schwester Schwestern, f Mutter -, m Vater -, f Tante Tanten, m Onkel Onkel, m Hund Hunde,
f Katze Katzen, n Pferd Pferde, m Vogel Vögel, f Kuh Kühe, n Kaninchen Kaninchen, n Buch Bücher,
n Schulbuch Schulbücher, m Brief Briefe, f Zeitung Zeitungen, m Apfel Äpfel, n Ei Eier, m Kuchen Kuchen,
m Apfelkuchen Apfelkuchen, f Suppe Suppen, f Kartoffelsuppe Kartoffelsuppen, f Kartoffel Kartoffeln, n Brot -,
m Käse -, f Milch -, n Wasser -, m Tee -, m Kaffee -, m Apfelsaft -, n Hemd Hemden, n Kleid Kleider, m Mantel Mäntel,
m Wintermantel Wintermäntel, f Jacke Jacken, m Schuh Schuhe, m Ball Bälle, m Schlüssel Schlüssel,
m Hausschlüssel Hausschlüssel, n Bild Bilder, f Flasche Flaschen, f Tasse Tassen, f Kaffeetasse Kaffeetassen,
n Glas Gläser, f Lampe Lampen, f Tasche Taschen, m Tisch Tische, m Küchentisch Küchentische, m Stuhl Stühle,
m Gartenstuhl Gartenstühle, n Bett Betten, f Bank Bänke, f Tür Türen, f Haustür -, n Fenster Fenster,
n Küchenfenster -, f Wand -, n Auto Autos, m Bus Busse, m Schulbus Schulbusse, m Zug Züge, n Haus Häuser, f Küche -,
n Zimmer Zimmer, m Garten Gärten, m Park -, m Wald -, f Schule -, f Kirche Kirchen, m Bahnhof -, m See -,
f Brücke Brücken, m Baum -, m Apfelbaum -, n Dorf Dörfer, m Tag -, m Morgen -, m Abend -, m Sonntag -, f Nacht -,
m Winter -, m Sommer -, f Woche -, n Hause -'''
DATIVE_PLURAL = {'Frauen', 'Mädchen', 'Schwestern', 'Tanten', 'Katzen', 'Kaninchen', 'Zeitungen', 'Kuchen',
                 'Apfelkuchen', 'Suppen', 'Kartoffelsuppen', 'Hemden', 'Jacken', 'Flaschen', 'Tassen',
                 'Kaffeetassen', 'Lampen', 'Taschen', 'Betten', 'Türen', 'Autos', 'Gärten', 'Kirchen',
                 'Brücken'}    # these add no -n
GENDER, PLURAL = {}, {}
for row in NOUNS.replace('\n', ' ').split(','):
    gender, singular, plural = row.split()
    GENDER[singular] = gender
    if plural != '-': PLURAL[plural] = plural if plural in DATIVE_PLURAL else plural + 'n'
FORMS = set(GENDER) | set(PLURAL) | set(PLURAL.values())

# For each (case, column): the endings of der, dieser and ein, and of the adjective after each of them and alone.
ENDINGS = {row[:2]: row[2:] for row in map(str.split, '''
nom m   der er -   e er er
nom f   die e  e   e e  e
nom n   das es -   e es es
nom p   die e  e   en en e
acc m   den en en  en en en
acc f   die e  e   e e  e
acc n   das es -   e es es
acc p   die e  e   en en e
dat m   dem em em  en en em
dat f   der er er  en en er
dat n   dem em em  en en em
dat p   den en en  en en en'''.strip().splitlines()) for row in [tuple(row)]}
MELTED = {'im': 'dat', 'am': 'dat', 'zum': 'dat', 'beim': 'dat', 'vom': 'dat', 'zur': 'dat', 'ins': 'acc'}
ADJECTIVES = {'klein', 'groß', 'alt', 'jung', 'neu', 'schön', 'rot', 'schwarz', 'weiß', 'gut', 'freundlich',
              'kalt', 'warm', 'frisch', 'müd', 'hungrig', 'traurig', 'glücklich'}
STRONG, WEAK = ('dies', 'jed', 'all', 'viel'), ('der', 'die', 'das', 'den', 'dem')
POSSESSIVE = ('ein', 'kein', 'mein', 'unser', 'sein', 'ihr')
PREPOSITIONS = {'mit': 'dat', 'von': 'dat', 'aus': 'dat', 'zu': 'dat', 'bei': 'dat',
                'für': 'acc', 'durch': 'acc', 'um': 'acc'}

def adjective_ending(word):
    "Its ending if this is an inflected adjective."
    for ending in ('em', 'en', 'er', 'es', 'e'):
        if word.endswith(ending) and word[:-len(ending)].lower() in ADJECTIVES: return ending

def readings(determiner, ending, noun):
    "All (case, column) in which determiner, adjective ending and noun agree."
    determiner = determiner.lower()
    for (case, column), (der, dieser, ein, weak, mixed, strong) in ENDINGS.items():
        if column == 'p':
            if noun not in (PLURAL.values() if case == 'dat' else PLURAL): continue
        elif GENDER.get(noun) != column: continue
        if determiner in WEAK: fits, declined = determiner == der, weak
        elif determiner in MELTED:
            melted = {'zur': 'f', 'ins': 'n'}.get(determiner, 'mn')
            fits, declined = case == MELTED[determiner] and column in melted, weak
        elif any(determiner in (stem + e for e in ('e', 'en', 'em', 'er', 'es')) for stem in STRONG):
            stem = next(stem for stem in STRONG if determiner.startswith(stem))
            fits, declined = determiner == stem + dieser, strong if stem == 'viel' else weak
        elif any(determiner in (stem + e for e in ('', 'e', 'en', 'em', 'er')) for stem in POSSESSIVE):
            stem = max((stem for stem in POSSESSIVE if determiner.startswith(stem)), key=len)
            fits, declined = determiner == stem + ein.strip('-') and not (stem == 'ein' and column == 'p'), mixed
        elif determiner in ('zwei', 'drei'): fits, declined = column == 'p', strong
        else: fits, declined = True, strong              # no determiner
        if fits and ending in (None, declined): yield case, column

def is_determiner(word):
    word = word.lower()
    return (word in WEAK or word in MELTED or word in ('zwei', 'drei')
            or any(word in (stem + e for e in ('e', 'en', 'em', 'er', 'es')) for stem in STRONG)
            or any(word in (stem + e for e in ('', 'e', 'en', 'em', 'er')) for stem in POSSESSIVE))

def noun_phrases(tokens):
    "(word before, determiner or '', adjective ending or None, noun) for each noun of a German sentence."
    for i, word in enumerate(tokens):
        if word in FORMS and not (i == 0 and adjective_ending(word)):
            ending = adjective_ending(tokens[i - 1]) if i else None
            at = i - 1 - (ending is not None)
            determiner = tokens[at] if at >= 0 and is_determiner(tokens[at]) else ''
            before = at - bool(determiner)
            yield tokens[before].lower() if before >= 0 else '', determiner, ending, word

@pytest.mark.parametrize('phrase, agrees', [
    ('der kleine Hund', True), ('den kleinen Hund', True), ('dem kleinen Hund', True), ('der kleiner Hund', False),
    ('ein kleiner Hund', True), ('ein kleine Hund', False), ('den kleinen Hunden', True), ('den kleinen Hunde', False),
    ('im alten Garten', True), ('im alte Garten', False), ('die Mädchen', True), ('der Mädchen', False),
    ('kaltes Milch', False), ('unsere alte Katze', True), ('unsere alten Katzen', True),
    ('unsere alte Katzen', False), ('viele alten Hunde', False)])
def test_the_agreement_checker_itself(phrase, agrees):
    (_, determiner, ending, noun), = noun_phrases(phrase.split())
    assert bool(list(readings(determiner, ending, noun))) == agrees

def test_every_noun_phrase_agrees(everything):
    seen = set()
    for pair in everything:
        for before, determiner, ending, noun in noun_phrases(pair.tgt_words):
            found = set(readings(determiner, ending, noun))
            # 'zeigt ihr kleine Hunde'
            if determiner == 'ihr' and not found: found = set(readings('', ending, noun))
            if before in PREPOSITIONS and noun != 'Hause':
                found = {(case, column) for case, column in found if case == PREPOSITIONS[before]}
            assert found, f'{before} {determiner} {ending} {noun} in {pair.tgt!r}'
            if len(found) == 1: seen |= found
    assert len(seen) >= 7        # forms that can only be one thing: the others are shared by several places

def test_every_capitalised_word_is_a_noun_or_comes_first(everything):
    for pair in everything:
        for word in pair.tgt_words[1:]:
            assert word in FORMS or word[0].islower() or not word.isalpha(), (word, pair.tgt)

def test_subjects_and_verbs_agree(everything):
    endings = {'ich': re.compile('.*(e|bin|kann|muss|darf|will|mag|weiß)$'),
               'wir': re.compile('.*(en|sind)$'), 'er': re.compile('.*(t|kann|muss|darf|will|mag|weiß|sollte)$')}
    for pair in everything:
        tokens = [token.lower() for token in pair.tgt_words]
        for person, ending in endings.items():
            if tokens[0] == person: assert ending.match(tokens[1]), pair.tgt

# Order

def test_subordinate_clauses_end_in_their_verb_and_others_have_it_second(toy):
    for pair in toy['train']:
        tokens = pair.tgt_words
        after = tokens[tokens.index(',') + 1] if tokens.count(',') == 1 else ''
        if after in ('weil', 'obwohl', 'wenn', 'während', 'dass'):
            assert 'verb last' in pair.phenomena
            clause = tokens[tokens.index(',') + 2:-1]
            if 'und' not in clause and 'aber' not in clause:
                finite = pair.tgt_words.index(clause[-1], tokens.index(','))
                assert finite == len(tokens) - 2 and clause[-1][0].islower()
                src = {s for source, target in pair.alignment if finite in target for s in source}
                assert src, pair                              # the verb, which English put earlier
        if 'participle last' in pair.phenomena and ',' not in tokens and not {'und', 'aber'} & set(tokens):
            assert re.match(r'.*(en|t)$', tokens[-2]) and tokens[1:].count(tokens[-2]) == 1

def test_the_finite_verb_stands_second_after_a_time_too(toy):
    first = Counter()
    for pair in toy['train']:
        tokens = pair.tgt_words
        if tokens[0] not in ('Heute', 'Jetzt') or ',' in tokens: continue
        first[tokens[0]] += 1
        finite = tokens[1 + (tokens[1] == 'Morgen')]                       # 'Heute Morgen' is one time
        assert 'verb second' in pair.phenomena
        irregular = 'bin|kann|muss|darf|will|mag|weiß|ist|sind|wird|hat'
        assert re.fullmatch(rf'[a-zäöüß]+(e|t|en|st)|{irregular}', finite), pair.tgt
        assert finite not in {'heute', 'nicht', 'eine', 'keine', 'meine', 'seine', 'ihre', 'unsere', 'diese', 'alte'}
    assert sum(first.values()) > 200, first

def test_separable_prefixes_come_apart_and_together(toy):
    prefixes = {'auf', 'zu', 'an', 'mit', 'ein'}
    def ends(pair): return [tgt[1] for _, tgt in pair.alignment if len(tgt) == 2 and pair.tgt_words[tgt[1]] in prefixes]
    apart = [pair for pair in toy['train'] if ends(pair)]
    assert len(apart) > 500
    assert all('separable prefix' in pair.phenomena for pair in apart)
    for pair in apart:
        for end in ends(pair): assert pair.tgt_words[end + 1] in ('.', ',', 'und', 'aber'), pair.tgt
    assert any(re.search(r'\bweil \w+ .*(aufmacht|aufmachen)\.', pair.tgt) for pair in toy['train'])

# Text and alignment

def test_text_is_normal_text(everything):
    for pair in everything:
        for text, tokens in ((pair.src, pair.src_words), (pair.tgt, pair.tgt_words)):
            assert '  ' not in text and text == text.strip() and text[0].isupper()
            assert re.fullmatch(r"[A-ZÄÖÜ][\w,. ]*\.", text) and text.count('.') == 1
            assert ' ,' not in text and ' .' not in text and ',,' not in text
            assert re.sub(r' (?=[,.])', '', ' '.join(tokens)) == text == ' '.join(text.split())
    for umlaut in 'äöüßÄ': assert any(umlaut in pair.tgt for pair in everything)
    assert not any('ae' in pair.tgt or 'oe' in pair.tgt for pair in everything)

def test_articles_before_vowels(everything):
    for pair in everything:
        assert not re.search(r'\b[Aa] [aeiou]|\b[Aa]n [^aeiou]', pair.src), pair.src

def test_contractions_are_made(everything):
    for pair in everything:
        assert not re.search(r'\b(in|an|bei|von|zu) dem\b|\bzu der\b|\bin das\b', pair.tgt.lower()), pair.tgt

def test_alignment_covers_everything_but_german_commas(everything):
    for pair in everything:
        src, tgt = len(pair.src_words), len(pair.tgt_words)
        assert {s for source, _ in pair.alignment for s in source} == set(range(src)), pair
        missing = set(range(tgt)) - {t for _, target in pair.alignment for t in target}
        assert {pair.tgt_words[t] for t in missing} <= {','}, pair
        assert all(source and target and max(source) < src and max(target) < tgt for source, target in pair.alignment)

def test_alignment_is_a_dictionary(everything):
    "The same English word leads to few German ones; a wrong link would add strangers."
    def of(word): return {' '.join(p.tgt_words[t] for t in target).lower() for p in everything
                          for source, target in p.alignment if [p.src_words[s].lower() for s in source] == [word]}
    assert of('because') == {'weil'} and of('dog') == {'hund'} and of('winter') == {'winter'}
    assert of('not') <= {'nicht', 'kein', 'keine', 'keinen'}
    assert of('opens') == {'macht auf', 'aufmacht'}
    assert of('reads') == {'liest'} and of('slept') == {'geschlafen'}

# Splits

def test_sizes(toy):
    assert {split: len(pairs) for split, pairs in toy.items()} == SPLITS
    assert SPLITS['train'] == 20_000 and SPLITS['val'] == SPLITS['test'] == 500

def test_no_sentence_is_in_two_splits_whatever_the_seed(toy, everything):
    assert (len({pair.src for pair in everything}) == len(everything)
            == len({(pair.src, pair.tgt) for pair in everything}))
    train = {pair.src for pair in toy['train']}
    for split in ('val', 'test', 'test_long', 'test_combinations'):
        assert not train & {pair.src for pair in toy_ende(split, seed=3, n=50)}

def test_one_german_for_every_english(everything):
    german = {}
    for pair in everything + toy_ende('train', seed=5, n=2000):
        assert german.setdefault(pair.src, pair.tgt) == pair.tgt

def test_long_sentences_are_longer(toy):
    for side in ('src_words', 'tgt_words'):
        longest = max(len(getattr(pair, side)) for split in SPLITS if split != 'test_long' for pair in toy[split])
        assert longest <= LONGEST < min(len(getattr(pair, side)) for pair in toy['test_long'])

def test_held_out_combinations_are_new(toy):
    known = {combination for pair in toy['train'] for combination in pair.combinations}
    for pair in toy['test_combinations']: assert pair.combinations - known, pair.src
    for pair in toy['train']:                           # the record forgets no adjective in front of its noun
        for first, second in zip(pair.src_words, pair.src_words[1:]):       # second: perhaps half of a compound
            assert (first, second) not in known or any(
                c[0] == first and second in c[1].split() for c in pair.combinations), pair

def test_no_word_is_new(toy):
    for side in ('src_words', 'tgt_words'):
        known = {word for pair in toy['train'] for word in getattr(pair, side)}
        for split, pairs in toy.items():
            assert not {word for pair in pairs for word in getattr(pair, side)} - known, split

def test_word_forms(toy):
    for side in ('src_words', 'tgt_words'):
        forms = {word for pair in toy['train'] for word in getattr(pair, side) if word.isalpha()}
        assert 300 <= len({form.lower() for form in forms}) <= len(forms) <= 600

def test_every_phenomenon_is_in_every_split(toy):
    for split, pairs in toy.items():
        counts = {name: sum(name in pair.phenomena for pair in pairs) for name in PHENOMENA}
        assert min(counts.values()) >= (1000 if split == 'train' else 10), (split, counts)
        assert all(pair.phenomena <= set(PHENOMENA) for pair in pairs)

def test_phenomena_are_what_they_say(everything):
    signs = {'nicht': r'\bnicht\b', 'kein': r'\bkeine?[nrm]?\b',
             'participle last': r'\b(habe|hat|haben|bin|ist|sind)\b',
             'infinitive last': r'\b(kann|können|muss|müssen|sollten?|darf|dürfen|will|wollen)\b',
             'verb last': r'\b(weil|obwohl|wenn|während|dass)\b'}
    for pair in everything:
        for name, sign in signs.items():
            if name == 'participle last': assert name not in pair.phenomena or re.search(sign, pair.tgt, re.I)
            else: assert (name in pair.phenomena) == bool(re.search(sign, pair.tgt, re.I)), (name, pair.tgt)

# Determinism

def digest(pairs):
    return hashlib.sha256('\n'.join(f'{p.src}\t{p.tgt}\t{p.alignment}' for p in pairs).encode()).hexdigest()

def test_another_process_writes_the_same(toy):
    code = ("import hashlib; from annotated_transformer.v1.toy_languages import toy_ende; "
            "print(hashlib.sha256('\\n'.join("
            "f'{p.src}\\t{p.tgt}\\t{p.alignment}' for p in toy_ende('val')).encode()).hexdigest())")
    for hash_seed in ('1', '2'):
        out = subprocess.run([sys.executable, '-c', code],
                             env={'PYTHONHASHSEED': hash_seed, 'PYTHONPATH': ':'.join(sys.path)},
                             capture_output=True, text=True, check=True).stdout
        assert out.strip() == digest(toy['val'])

def test_seeds_and_sizes():
    assert toy_ende('val', n=7) == toy_ende('val')[:7]
    assert toy_ende('val', seed=1, n=7) != toy_ende('val', n=7)
    first = toy_ende('val', n=7)
    first.clear()                                  # a caller's list is its own
    assert len(toy_ende('val', n=7)) == 7 and toy_ende('val', n=0) == []
    with pytest.raises(ValueError, match='train, val, test, test_long, test_combinations'): toy_ende('dev')
    with pytest.raises(ValueError, match='fewer than 0'): toy_ende('val', n=-1)

def test_words(): assert words('Der Hund, der müde ist.') == ['Der', 'Hund', ',', 'der', 'müde', 'ist', '.']

def test_pairs_are_frozen():
    pair = ToyPair('A.', 'B.', (), frozenset(), frozenset())
    with pytest.raises(AttributeError): pair.src = 'C.'

# The copy task

def test_copies():
    pairs = copy_pairs(500, seed=1, n_symbols=5, min_len=2, max_len=6)
    assert pairs == copy_pairs(500, seed=1, n_symbols=5, min_len=2, max_len=6) != copy_pairs(500, 2, 5, 2, 6)
    assert len(set(pairs)) == 500 and all(src == tgt for src, tgt in pairs)
    assert {len(src.split()) for src, _ in pairs} == {2, 3, 4, 5, 6}
    assert {symbol for src, _ in pairs for symbol in src.split()} == set('12345')
    assert copy_pairs(0) == [] and len(copy_pairs(6, n_symbols=2, max_len=2)) == 6

@pytest.mark.parametrize('sizes', [dict(n=7, n_symbols=2, max_len=2), dict(n=-1), dict(n=1, n_symbols=0),
                                   dict(n=1, min_len=0), dict(n=1, min_len=3, max_len=2)])
def test_copies_that_cannot_be(sizes):
    with pytest.raises(ValueError, match='n='): copy_pairs(**sizes)
