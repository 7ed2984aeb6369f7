// Guided tours. Each step sets what differs from a fresh page, and says what to see.
// `turn` lists [stack, layer, head, query word, key word].
const DOG = 'The dog sleeps in the house because it is tired.';
const LONG = 'The young woman reads a book in the garden, and the old man drinks coffee because he is tired, '
  + 'but the children play with the ball.';

export const TOURS = {
  'Articles and case': [
    {text: 'The old man sees the young dog.', box: 'decoder.softmax',
     say: 'English says “the” twice. German says “Der” for the subject and “den” for the object. '
       + 'Play the translation and watch both articles appear.'},
    {text: 'The young dog sees the old man.', box: 'decoder.softmax',
     say: 'The same words in another order: now the dog is the subject. The articles and the endings of the '
       + 'adjectives follow the role of the noun, not the noun itself.'},
    {text: 'The old man sees the young dog.', box: 'decoder.1.cross', heads: [2], predicts: '·den',
     say: 'Before it writes “den”, the decoder looks at the source. In this head of its second layer, '
       + 'most of the weight is on the word that is translated next.'},
    {text: 'The old woman gives the young man a new book.', box: 'decoder.softmax',
     say: 'Three roles in one sentence: “Die Frau” gives, “dem Mann” receives, “ein Buch” is given.'},
  ],
  'Word order': [
    {text: 'The man must look for this jacket.', box: 'decoder.1.cross', heads: [2],
     say: 'English keeps “must look for” together. German moves the infinitive to the end: “muss … suchen”. '
       + 'Step through and follow the ribbon: it jumps over the jacket and returns.'},
    {text: 'Today the woman is hungry, but the child does not eat.', box: 'decoder.1.cross', heads: [2],
     say: 'When another word comes first, the German verb stays in second place: “Heute ist die Frau …”.'},
    {text: 'The small dog sleeps in the garden because it is tired.', box: 'decoder.1.cross', heads: [2],
     say: 'After “weil”, the verb moves to the end: “weil er müde ist”.'},
    {text: 'The small dog sleeps in the garden because it is tired.', positions: false, box: 'encoder.embedding',
     say: 'Now the position vectors are set to zero. The model sees a bag of words, and the translation breaks down.'},
  ],
  'How a pronoun finds its noun': [
    {text: DOG, box: 'decoder.softmax',
     say: 'What is tired? The model writes “er”, he: in German, the dog is masculine. For the house, it would have to '
       + 'be “es”. So before it writes the pronoun, the model must know what “it” stands for.'},
    {text: DOG, box: 'encoder.1.self', heads: [2, 3], source: '·it',
     say: 'In the second encoder layer, heads 3 and 4 connect “it” with “dog”. Do they decide the '
       + 'pronoun? The next step tests it.'},
    {text: DOG, box: 'encoder.1.self', heads: [2, 3], source: '·it',
     turn: [['encoder', 1, 2, '·it', '·house'], ['encoder', 1, 3, '·it', '·house']],
     say: 'Turn both heads from “dog” to “house”, and “er” becomes “es”. Nothing else was changed. '
       + 'That is a causal test: in this sentence, these two heads carry the gender.'},
    {text: DOG, box: 'encoder.1.self', heads: [0, 1], source: '·it',
     turn: [['encoder', 1, 0, '·it', '·house'], ['encoder', 1, 1, '·it', '·house']],
     say: 'The control: turn heads 1 and 2 instead. The pronoun stays “er”.'},
  ],
  'Why long sentences fail': [
    {text: LONG, box: 'decoder.softmax',
     say: 'This sentence is longer than any that the model was trained on. Compare the translation with the '
       + 'sentence, clause by clause.'},
    {text: LONG, box: 'encoder.embedding', source: '·play',
     say: 'One suspect: the position vectors of the last words never occurred in training, so neither did their sums '
       + 'with the embeddings. But the cause remains open: on page 40 of the book, models with relative positions are '
       + 'immune to late positions, yet they fail on long sentences as well.'},
    {text: LONG, box: 'decoder.softmax', method: 'beam',
     say: 'A larger search does not repair what the model has not learned. And look at the probabilities: the model '
       + 'can be certain and wrong.'},
  ],
};
