"Toy EN-DE and the copy task: the sentences of 0.1.0, correct German, exact alignments, splits that do not leak."
import binascii
import hashlib
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import product

import pytest

from annotated_transformer import toy_words
from annotated_transformer.toy_grammar import (
    GERMAN_COMMA, NOTHING, Draft, be_clause, english_words, join_phrases, main_clause, make_clause, noun_phrase,
    prepositional_phrase, pronoun, split_words, subordinate_clause, to_text)
from annotated_transformer.toy_languages import (
    LONGEST, PHENOMENA, SPLITS, ToyPair, copy_pairs, is_held_out, make_pair, split_of, text_hash, toy_ende, toy_pairs)
from annotated_transformer.toy_words import (
    ALL_ADJECTIVES, DETERMINERS, MODALS, NOUNS, PLACE_PREPOSITIONS, PRONOUNS, VERBS)


@pytest.fixture(scope='module')
def toy():
    return {split: toy_ende(split) for split in SPLITS}

@pytest.fixture(scope='module')
def everything(toy):
    return [pair for pairs in toy.values() for pair in pairs]


# --- the sentences of 0.1.0: the shipped model was trained on them

OF_0_1_0 = {
    ('train', 0, None): 'a152bf74371a8203',
    ('val', 0, None): 'bd8c75a4f167ae47',
    ('test', 0, None): '9b4937732ea4b3ca',
    ('test_long', 0, None): '0f4e898df199f873',
    ('test_combinations', 0, None): 'cbdbc2b93047c856',
    ('train', 7, 200): 'd741448714c4adcc',
    ('val', 7, 200): '1d6bd5b38220268d',
    ('test', 7, 200): '3a705356a882e34f',
    ('test_long', 7, 200): '1f6a3c1a5b22cb6b',
    ('test_combinations', 7, 200): '49a501713e76f41d',
    ('train', 3, 3000): '3d309eaf15c4e09a',
}

def digest(pairs):
    rows = [f'{p.src}\t{p.tgt}\t{p.alignment}\t{sorted(p.phenomena)}\t{sorted(p.combinations)}' for p in pairs]
    return hashlib.sha256('\n'.join(rows).encode()).hexdigest()[:16]

@pytest.mark.parametrize('split', SPLITS)
def test_default_splits_are_those_of_0_1_0(toy, split):
    assert digest(toy[split]) == OF_0_1_0[split, 0, None]

@pytest.mark.parametrize('split, seed, n', [key for key in OF_0_1_0 if key[2]])
def test_other_seeds_and_sizes_are_those_of_0_1_0(split, seed, n):
    assert digest(toy_ende(split, seed, n)) == OF_0_1_0[split, seed, n]

def test_pairs_of_any_length_are_those_of_0_1_0():
    rng = random.Random(5)
    assert digest([make_pair(rng, 1 + i % 3) for i in range(3000)]) == '08ef4a86d2fbb292'

@pytest.mark.parametrize('options, expected', [
    (dict(n=21500), '31d61cd4c3ceb100'),
    (dict(n=500, seed=1, n_symbols=5, min_len=2, max_len=6), 'f52107a3096b1e82')])
def test_the_copy_task_is_that_of_0_1_0(options, expected):
    assert hashlib.sha256(repr(copy_pairs(**options)).encode()).hexdigest()[:16] == expected

def test_another_process_makes_the_same_sentences(toy):
    code = ("import hashlib; from annotated_transformer.toy_languages import toy_ende\n"
            "rows = [f'{p.src}\\t{p.tgt}\\t{p.alignment}\\t{sorted(p.phenomena)}\\t{sorted(p.combinations)}'"
            " for p in toy_ende('val')]\n"
            "print(hashlib.sha256('\\n'.join(rows).encode()).hexdigest()[:16])")
    for hash_seed in ('1', '2'):
        env = {'PYTHONHASHSEED': hash_seed, 'PYTHONPATH': ':'.join(sys.path)}
        out = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=True).stdout
        assert out.strip() == digest(toy['val'])


# --- sentences written by hand before the grammar was asked

NOUN = {noun.en: noun for noun in NOUNS}
ADJECTIVE = {adjective.en: adjective for adjective in ALL_ADJECTIVES}
VERB = {verb.en[0]: verb for verb in VERBS}
MODAL = {modal.base: modal for modal in MODALS}

def read(draft, phrase, case, negation=()):
    "A noun phrase or pronoun from its English words."
    for person, (english, _) in PRONOUNS.items():
        if phrase in english:
            return pronoun(draft, person, case)
    det, *rest = phrase.split() if phrase.split()[0] in DETERMINERS else ['', *phrase.split()]
    adjective = ADJECTIVE[rest.pop(0)] if rest[0] in ADJECTIVE else None
    name = ' '.join(rest)
    noun = next(noun for noun in NOUNS if name in (noun.en, noun.en_plural))
    return noun_phrase(draft, noun, case, det, adjective, name == noun.en_plural, negation)

def say(subject, verb, thing=None, to=None, where=None, time=None, often=None, mode='present', no=False,
        first='subject'):
    "The German sentence for these parts; `first`: what it begins with, or 'weil' for a subordinate clause."
    draft = Draft()
    negation = draft.new_link() if no else ()
    place = NOTHING
    if where:
        name, inner = where.split(': ')
        preposition = PLACE_PREPOSITIONS[name]
        place = prepositional_phrase(draft, preposition, read(draft, inner, preposition.case))
    clause = make_clause(
        draft, read(draft, subject, 'nominative'), VERB[verb], MODAL.get(mode, mode),
        dative=read(draft, to, 'dative') if to else None,
        thing=read(draft, thing, 'accusative', negation) if thing else None,
        where=place, time=draft.fixed(time) if time else NOTHING,
        adverb=draft.fixed(often) if often else NOTHING, negation=negation)
    if first == 'weil':
        return to_text(subordinate_clause(draft, 'because', clause).de)
    return to_text(join_phrases(main_clause(draft, clause, first), draft.tie('.', '.')).de)

def two(conjunction, second, subject='the dog', thing=None, verb='sleep', front=False):
    "Two clauses, the second about what the first mentions."
    draft = Draft()
    who = read(draft, subject, 'nominative')
    what = read(draft, thing, 'accusative') if thing else None
    one = make_clause(draft, who, VERB[verb], thing=what)
    he = pronoun(draft, who.person, 'nominative', who)
    if second in ADJECTIVE:
        other = be_clause(draft, he, ADJECTIVE[second])
    else:
        other = make_clause(draft, he, VERB[second], thing=pronoun(draft, what.person, 'accusative', what))
    if front:
        both = join_phrases(subordinate_clause(draft, conjunction, one), draft.tie(',', ','),
                            main_clause(draft, other, 'clause'))
    else:
        both = join_phrases(main_clause(draft, one), GERMAN_COMMA, subordinate_clause(draft, conjunction, other))
    return to_text(join_phrases(both, draft.tie('.', '.')).de)

BY_HAND = [
    ('Der kleine Hund schläft im alten Garten.',
     lambda: say('the small dog', 'sleep', where='in: the old garden')),
    ('Ein kleiner Hund schläft in einem alten Haus.',
     lambda: say('a small dog', 'sleep', where='in: a old house')),
    ('Die alte Frau sieht den jungen Mann.', lambda: say('the old woman', 'see', 'the young man')),
    ('Mein Bruder sieht eine schwarze Katze.', lambda: say('my brother', 'see', 'a black cat')),
    ('Das kleine Mädchen sieht ein schönes Pferd.',
     lambda: say('the small girl', 'see', 'a beautiful horse')),
    ('Diese Kinder sehen unsere alten Hunde.', lambda: say('these children', 'see', 'our old dogs')),
    ('Viele müde Männer trinken kalte Milch.', lambda: say('many tired men', 'drink', 'cold milk')),
    ('Er trinkt kaltes Wasser.', lambda: say('he', 'drink', 'cold water')),
    ('Ich trinke warmen Tee.', lambda: say('I', 'drink', 'warm tea')),
    ('Wir helfen dem alten Arzt.', lambda: say('we', 'help', to='the old doctor')),
    ('Sie helfen der alten Tante.', lambda: say('they', 'help', to='the old aunt')),
    ('Jeder Freund hilft einem müden Kind.', lambda: say('every friend', 'help', to='a tired child')),
    ('Ihre Tanten helfen unseren kleinen Vögeln.', lambda: say('her aunts', 'help', to='our small birds')),
    ('Seine Schwester zeigt mir drei neue Bilder.',
     lambda: say('his sister', 'show', 'three new pictures', to='me')),
    ('Alle Lehrer geben den Kindern gute Bücher.',
     lambda: say('all teachers', 'give', 'good books', to='the children')),
    ('Unser Küchentisch gehört diesem Lehrer.',
     lambda: say('our kitchen table', 'belong to', to='this teacher')),
    ('Das Kind legt ein Schulbuch auf den Gartenstuhl.',
     lambda: say('the child', 'lay', 'a school book', where='>on: the garden chair')),
    ('Die Schulbücher liegen auf dem Gartenstuhl.',
     lambda: say('the school books', 'lie', where='on: the garden chair')),
    ('Die Katze springt auf das Bett.', lambda: say('the cat', 'jump', where='onto: the bed')),
    ('Meine Mutter kommt aus der Küche.', lambda: say('my mother', 'come', where='out: the kitchen')),
    ('Ich arbeite für meinen Onkel.', lambda: say('I', 'work', where='for: my uncle')),
    ('Die Tante wäscht die Tassen mit warmem Wasser.',
     lambda: say('the aunt', 'wash', 'the cups', where='water: warm water')),
    ('Das Mädchen isst Brot mit frischer Milch.',
     lambda: say('the girl', 'eat', 'bread', where='side: fresh milk')),
    ('Am Abend liest der Arzt die Zeitung.',
     lambda: say('the doctor', 'read', 'the newspaper', time='in+the=am evening=Abend', first='time')),
    ('Der Arzt liest heute die Zeitung in der Küche.',
     lambda: say('the doctor', 'read', 'the newspaper', where='in: the kitchen', time='today=heute')),
    ('Die Frau hat den Brief geschrieben.', lambda: say('the woman', 'write', 'the letter', mode='perfect')),
    ('Die Kinder sind in den Wald gelaufen.',
     lambda: say('the children', 'run', where='into: the forest', mode='perfect')),
    ('Ich bin im See geschwommen.', lambda: say('I', 'swim', where='swim: the lake', mode='perfect')),
    ('Der Mann will ein Auto kaufen.', lambda: say('the man', 'buy', 'a car', mode='want to')),
    ('Heute muss ich arbeiten.', lambda: say('I', 'work', time='today=heute', mode='must', first='time')),
    ('Wir sollten die Tür zumachen.', lambda: say('we', 'close', 'the door', mode='should')),
    ('Mein Vater macht das Fenster auf.', lambda: say('my father', 'open', 'the window')),
    ('Der Zug kommt am Bahnhof an.', lambda: say('the train', 'arrive', where='goal: the station')),
    ('Sie hat einen Mantel angezogen.', lambda: say('she', 'put on', 'a coat', mode='perfect')),
    ('Die Freunde laden mich ein.', lambda: say('the friends', 'invite', 'me')),
    ('Das Kind schläft nicht.', lambda: say('the child', 'sleep', no=True)),
    ('Das Pferd läuft nicht in den Garten.',
     lambda: say('the horse', 'run', where='into: the garden', no=True)),
    ('Mein Onkel liest das Buch nicht.', lambda: say('my uncle', 'read', 'the book', no=True)),
    ('Meine Tante hat das Buch nicht gelesen.',
     lambda: say('my aunt', 'read', 'the book', mode='perfect', no=True)),
    ('Der Lehrer räumt das Zimmer nicht auf.', lambda: say('the teacher', 'clean up', 'the room', no=True)),
    ('Der Arzt isst keinen Kuchen.', lambda: say('the doctor', 'eat', 'a cake', no=True)),
    ('Die Ärzte können keine Milch trinken.',
     lambda: say('the doctors', 'drink', 'milk', mode='can', no=True)),
    ('Keine Katze trinkt Wasser.', lambda: say('no cat', 'drink', 'water')),
    ('Wir kaufen oft frische Äpfel.', lambda: say('we', 'buy', 'fresh apples', often='often=oft')),
    ('Der Hund darf nicht auf dem Bett schlafen.',
     lambda: say('the dog', 'sleep', where='seat: the bed', mode='may', no=True)),
    ('Weil mein Vater das Fenster aufmacht', lambda: say('my father', 'open', 'the window', first='weil')),
    ('Weil die Frau den Brief nicht geschrieben hat',
     lambda: say('the woman', 'write', 'the letter', mode='perfect', no=True, first='weil')),
    ('Weil wir heute arbeiten müssen',
     lambda: say('we', 'work', time='today=heute', mode='must', first='weil')),
    ('Weil der Zug am Bahnhof ankommt',
     lambda: say('the train', 'arrive', where='goal: the station', first='weil')),
    ('Die Katze schläft, weil sie müde ist.', lambda: two('because', 'tired', 'the cat')),
    ('Das Pferd schläft, obwohl es hungrig ist.', lambda: two('although', 'hungry', 'the horse')),
    ('Die Frau kauft den Mantel, weil sie ihn braucht.',
     lambda: two('because', 'need', 'the woman', 'the coat', 'buy')),
    ('Der Mann kauft eine Lampe, weil er sie braucht.',
     lambda: two('because', 'need', 'the man', 'a lamp', 'buy')),
    ('Die Kinder kaufen ein Buch, weil sie es brauchen.',
     lambda: two('because', 'need', 'the children', 'a book', 'buy')),
    ('Das Mädchen liest die Bücher, wenn es sie mag.',
     lambda: two('when', 'like', 'the girl', 'the books', 'read')),
    ('Wenn der Vogel schläft, ist er müde.', lambda: two('when', 'tired', 'the bird', front=True))
]

@pytest.mark.parametrize('german, make', BY_HAND, ids=[german for german, _ in BY_HAND])
def test_sentences_written_by_hand(german, make):
    assert make() == german


# --- agreement, against tables written for this test: gender and plural of every noun, and the endings

GENDERS = '''
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
for row in GENDERS.replace('\n', ' ').split(','):
    gender, singular, plural = row.split()
    GENDER[singular] = gender
    if plural != '-': PLURAL[plural] = plural if plural in DATIVE_PLURAL else plural + 'n'
FORMS = set(GENDER) | set(PLURAL) | set(PLURAL.values())

# For each (case, column): the endings of der, dieser and ein, and of the adjective after each of them and alone.
TABLE = {row[:2]: row[2:] for row in map(str.split, '''
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
CONTRACTED = {'im': 'dat', 'am': 'dat', 'zum': 'dat', 'beim': 'dat', 'vom': 'dat', 'zur': 'dat', 'ins': 'acc'}
STEMS = {'klein', 'groß', 'alt', 'jung', 'neu', 'schön', 'rot', 'schwarz', 'weiß', 'gut', 'freundlich',
              'kalt', 'warm', 'frisch', 'müd', 'hungrig', 'traurig', 'glücklich'}
STRONG, WEAK = ('dies', 'jed', 'all', 'viel'), ('der', 'die', 'das', 'den', 'dem')
POSSESSIVE = ('ein', 'kein', 'mein', 'unser', 'sein', 'ihr')
PREPOSITIONS = {'mit': 'dat', 'von': 'dat', 'aus': 'dat', 'zu': 'dat', 'bei': 'dat',
                'für': 'acc', 'durch': 'acc', 'um': 'acc'}

def adjective_ending(word):
    "Its ending if this is an inflected adjective."
    for ending in ('em', 'en', 'er', 'es', 'e'):
        if word.endswith(ending) and word[:-len(ending)].lower() in STEMS: return ending

def readings(determiner, ending, noun):
    "All (case, column) in which determiner, adjective ending and noun agree."
    determiner = determiner.lower()
    for (case, column), (der, dieser, ein, weak, mixed, strong) in TABLE.items():
        if column == 'p':
            if noun not in (PLURAL.values() if case == 'dat' else PLURAL): continue
        elif GENDER.get(noun) != column: continue
        if determiner in WEAK: fits, declined = determiner == der, weak
        elif determiner in CONTRACTED:
            contracted = {'zur': 'f', 'ins': 'n'}.get(determiner, 'mn')
            fits, declined = case == CONTRACTED[determiner] and column in contracted, weak
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
    return (word in WEAK or word in CONTRACTED or word in ('zwei', 'drei')
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

# --- word order

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

# --- text and alignment

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
    found = defaultdict(set)
    for pair in everything:
        for source, target in pair.alignment:
            if len(source) == 1:
                found[pair.src_words[source[0]].lower()].add(' '.join(pair.tgt_words[t] for t in target).lower())
    of = found.get
    assert of('because') == {'weil'} and of('dog') == {'hund'} and of('winter') == {'winter'}
    assert of('not') <= {'nicht', 'kein', 'keine', 'keinen'}
    assert of('opens') == {'macht auf', 'aufmacht'}
    assert of('reads') == {'liest'} and of('slept') == {'geschlafen'}

# --- splits

def test_sizes(toy):
    assert {split: len(pairs) for split, pairs in toy.items()} == SPLITS
    assert SPLITS == {'train': 20_000, 'val': 500, 'test': 500, 'test_long': 500, 'test_combinations': 500}

def test_no_english_sentence_occurs_twice_whatever_the_seed(toy, everything):
    assert len({pair.src for pair in everything}) == len(everything)
    train = {pair.src for pair in toy['train']}
    for split in ('val', 'test', 'test_long', 'test_combinations'):
        assert not train & {pair.src for pair in toy_ende(split, seed=3, n=50)}

def test_no_german_sentence_is_in_two_splits(toy):
    "Corpus toy-ende also offers de-en; nothing but luck keeps German sentences apart, so this is checked."
    german = [{pair.tgt for pair in pairs} for pairs in toy.values()]
    assert sum(len(sentences) for sentences in german) == len(set.union(*german))
    assert len(toy['train']) - len({pair.tgt for pair in toy['train']}) == 29 # as the page says

def test_one_german_for_every_english(everything):
    german = {}
    for pair in everything + toy_ende('train', seed=5, n=2000):
        assert german.setdefault(pair.src, pair.tgt) == pair.tgt

def test_long_sentences_are_longer(toy):
    for side in ('src_words', 'tgt_words'):
        longest = max(len(getattr(pair, side)) for split in SPLITS if split != 'test_long' for pair in toy[split])
        assert longest <= LONGEST < min(len(getattr(pair, side)) for pair in toy['test_long'])
        assert max(len(getattr(pair, side)) for pair in toy['test_long']) <= 2 * LONGEST

def test_held_out_combinations_are_new(toy):
    known = {combination for pair in toy['train'] for combination in pair.combinations}
    assert not any(is_held_out(combination) for combination in known)
    for pair in toy['test_combinations']:
        assert pair.combinations - known, pair.src
    for split in ('val', 'test'):
        assert not any(is_held_out(combination) for pair in toy[split] for combination in pair.combinations)
    for pair in toy['train']: # the record misses no adjective in front of its noun
        for first, second in zip(pair.src_words, pair.src_words[1:]):
            assert (first, second) not in known or any(
                c[0] == first and second in c[1].split() for c in pair.combinations), pair

def test_no_word_is_new(toy):
    for side in ('src_words', 'tgt_words'):
        known = {word for pair in toy['train'] for word in getattr(pair, side)}
        assert 300 <= len({word.lower() for word in known if word.isalpha()}) <= 600
        for split, pairs in toy.items():
            assert not {word for pair in pairs for word in getattr(pair, side)} - known, split

def test_splits_follow_from_the_sentence():
    rng = random.Random(1)
    counts = Counter(split_of(make_pair(rng)) for _ in range(3000))
    assert counts['train'] > 1500 and min(counts['val'], counts['test']) > 100 and counts['test_combinations'] > 100
    pair = next(toy_pairs('test'))
    assert text_hash(pair.src) % 10 == 0 and text_hash('a', 'b') == text_hash('a b') == binascii.crc32(b'a b')

def test_every_phenomenon_is_in_every_split(toy):
    for split, pairs in toy.items():
        counts = {name: sum(name in pair.phenomena for pair in pairs) for name in PHENOMENA}
        assert min(counts.values()) >= (1000 if split == 'train' else 10), (split, counts)
        assert all(pair.phenomena <= set(PHENOMENA) for pair in pairs)

def test_phenomena_are_what_they_say(everything):
    signs = {'nicht': r'\bnicht\b', 'kein': r'\bkeine?[nrm]?\b',
             'infinitive last': r'\b(kann|können|muss|müssen|sollten?|darf|dürfen|will|wollen)\b',
             'verb last': r'\b(weil|obwohl|wenn|während|dass)\b'}
    perfect = re.compile(r'\b(habe|hat|haben|bin|ist|sind)\b', re.I)
    for pair in everything:
        for name, sign in signs.items():
            assert (name in pair.phenomena) == bool(re.search(sign, pair.tgt, re.I)), (name, pair.tgt)
        assert 'participle last' not in pair.phenomena or perfect.search(pair.tgt)


# --- the functions

def test_only_not_and_cannot_carry_the_link_of_the_negation():
    words = english_words('does not notice', (1,), (2,)) + english_words('cannot', (3,), (2,))
    assert [word.links for word in words] == [(1,), (2,), (1,), (3, 2)]

def test_every_kind_is_known_to_nouns_and_to_other_tables():
    "A kind with a spelling mistake raises no error: the noun is never chosen."
    used = {kind for adjective in ALL_ADJECTIVES for kind in adjective.kinds} | set(toy_words.UNSUITED)
    used |= {row[4] for row in toy_words.read_table(toy_words.PREPOSITIONS)}
    for line in filter(None, (toy_words.INTRANSITIVE_VERBS + toy_words.TRANSITIVE_VERBS).splitlines()):
        _, _, subjects, objects, places = line.split('|')
        used |= set(subjects.split()) | set(objects.split()) - {'dat', 'acc', 'liked'}
        assert {name.strip('!') for name in places.split()} <= {'', 'home', *PLACE_PREPOSITIONS}
    of_nouns = {kind for noun in NOUNS for kind in noun.kinds}
    assert used - of_nouns == {'feels'}                     # marks adjectives
    assert of_nouns - used == {'he', 'she', 'it', 'mass'}   # read by the grammar

def test_seeds_and_sizes():
    assert toy_ende('val', n=7) == toy_ende('val')[:7]
    assert toy_ende('val', seed=1, n=7) != toy_ende('val', n=7)
    first = toy_ende('val', n=7)
    first.clear() # the list belongs to the caller
    assert len(toy_ende('val', n=7)) == 7 and toy_ende('val', n=0) == []
    with pytest.raises(ValueError, match='train, val, test, test_long, test_combinations'):
        toy_ende('dev')
    with pytest.raises(ValueError, match='0 pairs or more'):
        toy_ende('val', n=-1)

def test_split_words():
    assert split_words('Der Hund, der müde ist.') == ['Der', 'Hund', ',', 'der', 'müde', 'ist', '.']

def test_pairs_are_frozen():
    pair = ToyPair('A.', 'B.', (), frozenset(), frozenset())
    with pytest.raises(AttributeError):
        pair.src = 'C.'

def test_copies():
    pairs = copy_pairs(500, seed=1, n_symbols=5, min_len=2, max_len=6)
    assert pairs == copy_pairs(500, seed=1, n_symbols=5, min_len=2, max_len=6) != copy_pairs(500, 2, 5, 2, 6)
    assert len(set(pairs)) == 500 and all(src == tgt for src, tgt in pairs)
    assert {len(src.split()) for src, _ in pairs} == {2, 3, 4, 5, 6}
    assert {symbol for src, _ in pairs for symbol in src.split()} == set('12345')
    assert copy_pairs(0) == [] and len(copy_pairs(6, n_symbols=2, max_len=2)) == 6

@pytest.mark.parametrize('sizes', [dict(n=7, n_symbols=2, max_len=2), dict(n=-1), dict(n=1, n_symbols=0),
                                   dict(n=1, min_len=0), dict(n=1, min_len=3, max_len=2)])
def test_impossible_copies(sizes):
    with pytest.raises(ValueError, match='n='):
        copy_pairs(**sizes)

def test_names_shadow_no_builtin():
    import builtins
    from annotated_transformer import toy_grammar, toy_languages, toy_words
    for module, name in product((toy_grammar, toy_languages, toy_words), dir(builtins)):
        assert name not in module.__all__

def test_lists_of_every_size_begin_with_the_same_pairs_and_belong_to_the_caller():
    longer = toy_ende('train', seed=8, n=30)
    assert toy_ende('train', seed=8, n=10) == longer[:10]
    assert toy_ende('train', seed=8, n=40)[:30] == longer
    expected = list(longer)
    for n in (50, 30, 50):
        toy_ende('train', seed=8, n=n).clear()
    assert toy_ende('train', seed=8, n=30) == expected
