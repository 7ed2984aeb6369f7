// The project's byte-pair tokenizer, from the JSON that the library `tokenizers` writes.

// Python's white space, which differs from that of JavaScript's \s
const SPACES = /[\t-\r \x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/g;
const PUNCTUATION = /([\p{P}!-/:-@[-`{-~])/u;

export class Tokenizer {
  constructor({model}) {
    this.ids = new Map(Object.entries(model.vocab));
    this.tokens = [];
    for (const [token, id] of this.ids) this.tokens[id] = token;
    this.ranks = new Map(model.merges.map(([left, right], rank) => [`${left} ${right}`, rank]));
    this.unk = this.ids.get(model.unk_token);
  }

  // Pre-tokenization: words that begin with ▁, punctuation marks apart.
  words(text) {
    const spaced = text.toWellFormed().normalize('NFC').replace(SPACES, ' ').replace(/^ | $/g, '');
    const normal = spaced.replaceAll('▁', '_');
    if (!normal) return [];
    const marked = '▁' + normal.replaceAll(' ', '▁');
    return marked.split(/(?=▁)/).flatMap(word => word.split(PUNCTUATION)).filter(Boolean);
  }

  // The pieces of a word after each merge, from characters to tokens. null stands for unknown characters.
  merges(word) {
    let pieces = [];
    for (const character of word) {
      if (this.ids.has(character)) pieces.push(character);
      else if (pieces.at(-1) !== null) pieces.push(null);
    }
    const rows = [pieces];
    for (;;) {
      let best = Infinity;
      let place = -1;
      for (let i = 0; i + 1 < pieces.length; i++) {
        const rank = this.ranks.get(`${pieces[i]} ${pieces[i + 1]}`);
        if (rank < best) {
          best = rank;
          place = i;
        }
      }
      if (place < 0) return rows;
      const merged = pieces[place] + pieces[place + 1];
      pieces = [...pieces.slice(0, place), merged, ...pieces.slice(place + 2)];
      rows.push(pieces);
    }
  }

  encodeWord(word) {
    return this.merges(word).at(-1).map(piece => piece === null ? this.unk : this.ids.get(piece));
  }

  encode(text) {
    return this.words(text).flatMap(word => this.encodeWord(word));
  }

  // Special tokens are left out; unknown ones become ⁇.
  decode(ids) {
    const pieces = ids.filter(id => id > 2).map(id => id === this.unk ? '⁇' : this.tokens[id]);
    return pieces.join('').replaceAll('▁', ' ').replace(/^ /, '');
  }

  // A token as the page shows it.
  name(id) {
    return this.tokens[id].replace('▁', '·');
  }
}
