// What the page draws. Each function reads the state and draws one part of the page.
import {softmax} from './model.js';
import {samplingDistribution, topIndices} from './search.js';

export const byId = id => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const {attributes = {}, ...rest} = properties;
  const made = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function svgElement(tag, attributes = {}, text = null) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

export const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const rgb = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));

function onActivate(target, action) {
  target.addEventListener('click', action);
  target.addEventListener('keydown', event => {
    if (event.key !== 'Enter' && event.key !== ' ') return;
    event.preventDefault();
    action(event);
  });
}

// --- boxes of the model

const PARTS = {
  embedding: {name: 'Embedding + positions', short: 'Embed. + positions', color: 'gold'},
  self: {name: 'Self-attention', color: 'cross'},
  cross: {name: 'Cross-attention', color: 'cross'},
  norm1: {name: 'Add & norm', color: 'soft'},
  norm2: {name: 'Add & norm', color: 'soft'},
  norm3: {name: 'Add & norm', color: 'soft'},
  feedForward: {name: 'Feed-forward', color: 'good'},
  out: {name: 'Encoder output', color: 'encoder'},
  logits: {name: 'Output layer', color: 'gold'},
  softmax: {name: 'Softmax', color: 'decoder'},
};
const ENCODER_PARTS = ['self', 'norm1', 'feedForward', 'norm2'];
const DECODER_PARTS = ['self', 'norm1', 'cross', 'norm2', 'feedForward', 'norm3'];

export function boxParts(box) {
  const names = box.split('.');
  const layer = names.length === 3 ? Number(names[1]) : null;
  return {stack: names[0], layer, part: names.at(-1)};
}

export function boxName(box) {
  const {stack, layer, part} = boxParts(box);
  const masked = stack === 'decoder' && part === 'self' ? 'Masked self-attention' : PARTS[part].name;
  return layer === null ? masked : `${masked}, ${stack} layer ${layer + 1}`;
}

export const isAttention = box => /\.(self|cross)$/.test(box);

// The name of an attention in the model's `changes`.
export function siteOf(box) {
  const {stack, layer, part} = boxParts(box);
  return `${part === 'cross' ? 'cross' : stack} ${layer}`;
}

export function drawDiagram(state, choose) {
  const svg = byId('diagram');
  const width = 268;
  const boxWidth = 124;
  const boxHeight = 24;
  const gap = 29;
  const nLayers = state.model.config.n_layers;
  const encoderBoxes = ['encoder.embedding'];
  const decoderBoxes = ['decoder.embedding'];
  for (let l = 0; l < nLayers; l++) {
    encoderBoxes.push(...ENCODER_PARTS.map(part => `encoder.${l}.${part}`));
    decoderBoxes.push(...DECODER_PARTS.map(part => `decoder.${l}.${part}`));
  }
  encoderBoxes.push('encoder.out');
  decoderBoxes.push('decoder.logits', 'decoder.softmax');
  const height = decoderBoxes.length * gap + 52;
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.setAttribute('width', width);
  svg.setAttribute('height', height);
  const bottom = height - 26;
  const y = i => bottom - (i + 1) * gap;
  const column = (boxes, x) => boxes.map((box, i) => ({box, x, y: y(i)}));
  const placed = [...column(encoderBoxes, 2), ...column(decoderBoxes, width - boxWidth - 2)];
  const place = Object.fromEntries(placed.map(item => [item.box, item]));
  const line = color('line');
  const source = place['encoder.out'];
  for (let l = 0; l < nLayers; l++) { // the encoder's output enters every cross-attention
    const cross = place[`decoder.${l}.cross`];
    const from = source.y + boxHeight / 2;
    const to = cross.y + boxHeight / 2;
    const middle = width / 2;
    svg.append(svgElement('path', {
      d: `M${source.x + boxWidth} ${from}H${middle}V${to}H${cross.x}`, fill: 'none',
      stroke: color('encoder'), 'stroke-width': 1.5}));
  }
  for (const boxes of [encoderBoxes, decoderBoxes])
    for (let i = 1; i < boxes.length; i++) {
      const {x, y: top} = place[boxes[i]];
      svg.append(svgElement('path', {
        d: `M${x + boxWidth / 2} ${top + gap}V${top + boxHeight}`, stroke: color('soft'), 'stroke-width': 1.3}));
    }
  for (const {box, x, y: top} of placed) {
    const {part, stack, layer} = boxParts(box);
    const selected = box === state.box;
    const label = stack === 'decoder' && part === 'self' ? 'Masked self-att.' : PARTS[part].short ?? PARTS[part].name;
    const place = layer === null ? stack : `${stack} layer ${layer + 1}`;
    const group = svgElement('g', {
      role: 'button', tabindex: 0, 'aria-pressed': selected, 'aria-label': `${label}, ${place}`, 'data-box': box});
    const hue = color(PARTS[part].color);
    group.append(
      svgElement('rect', {
        x, y: top, width: boxWidth, height: boxHeight, rx: 5, stroke: hue, 'stroke-width': selected ? 3 : 1.2,
        fill: hue, 'fill-opacity': selected ? 0.32 : 0.1}),
      svgElement('text', {x: x + boxWidth / 2, y: top + 16.5}, label));
    onActivate(group, () => choose(box));
    svg.append(group);
  }
  svg.append(
    svgElement('text', {x: 2 + boxWidth / 2, y: height - 8}, 'English'),
    svgElement('text', {x: width - 2 - boxWidth / 2, y: height - 8}, 'German so far'),
    svgElement('text', {x: width - 2 - boxWidth / 2, y: 14}, 'next token'));
}

// --- the rows of an attention

// Queries, keys and numbers of the attention in `state.box`, or of the one that belongs to the box.
export function attentionView(state, box = state.box) {
  const {stack, layer, part} = boxParts(box);
  const {source, visible} = state;
  if (stack === 'encoder') {
    const rows = source.layers[layer].map(row => row.self);
    return {rows, queries: source.ids, keys: source.ids, queryStack: 'encoder', keyStack: 'encoder'};
  }
  const rows = visible.map(node => node.layers[layer][part]);
  const keys = part === 'cross' ? source.ids : visible.map(node => node.id);
  return {rows, queries: visible.map(node => node.id), keys, queryStack: 'decoder',
          keyStack: part === 'cross' ? 'encoder' : 'decoder'};
}

export const rowOf = (state, stack) => stack === 'encoder' ? state.sourceRow : state.targetRow;

const meanWeight = (row, heads, key) =>
  heads.reduce((sum, head) => sum + (row.weights[head][key] ?? 0), 0) / heads.length;

// Source token positions aligned with the token predicted at a target position, by the grammar.
function trueSources(state, query) {
  const alignment = state.alignment;
  const predicted = query + 1; // the query at position i predicts token i + 1
  if (!alignment || predicted > alignment.tgt.length) return [];
  const word = alignment.tgt[predicted - 1];
  const words = alignment.pairs.filter(([, tgt]) => tgt.includes(word)).flatMap(([src]) => src);
  return alignment.src.flatMap((srcWord, position) => words.includes(srcWord) ? [position] : []);
}

export function drawRibbons(state, actions) {
  const svg = byId('ribbons');
  const shown = isAttention(state.box);
  const names = ids => ids.map(id => state.tokenizer.name(id));
  svg.replaceChildren();
  byId('attention-tools').hidden = !shown;
  const view = shown ? attentionView(state) : {
    queries: state.visible.map(node => node.id), keys: state.source.ids, queryStack: 'decoder', keyStack: 'encoder'};
  const query = Math.min(rowOf(state, view.queryStack), view.queries.length - 1);
  const longest = Math.max(view.keys.length, view.queries.length);
  const available = svg.parentElement.clientWidth || 640;
  const width = Math.max(available, longest * 58);
  const height = 196;
  const [keyY, queryY] = [40, 158];
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.setAttribute('width', width);
  svg.setAttribute('height', height);
  const x = (i, n) => (i + 0.5) * width / n;
  const hue = {encoder: color('encoder'), decoder: color('decoder')};
  const title = byId('attention-title');
  const headNames = state.heads.map(head => head + 1).join(' and ');
  title.textContent = shown
    ? `${boxName(state.box)}: ${state.heads.length > 1 ? `mean of heads ${headNames}` : `head ${headNames}`}`
    : 'Tokens';
  if (shown) {
    const row = view.rows[query];
    const from = x(query, view.queries.length);
    const truth = state.box.endsWith('cross') ? trueSources(state, query) : [];
    for (const key of truth)
      svg.append(svgElement('path', {
        d: `M${from + 5} ${queryY - 16}C${from + 5} ${keyY + 62} ${x(key, view.keys.length) + 5} ${keyY + 62} `
          + `${x(key, view.keys.length) + 5} ${keyY + 16}`,
        fill: 'none', stroke: color('good'), 'stroke-width': 2.5, 'stroke-dasharray': '6 4', class: 'truth'}));
    row.keys.forEach((_, key) => {
      const weight = meanWeight(row, state.heads, key);
      if (weight < 0.01) return;
      const to = x(key, view.keys.length);
      svg.append(svgElement('path', {
        d: `M${from} ${queryY - 16}C${from} ${keyY + 62} ${to} ${keyY + 62} ${to} ${keyY + 16}`,
        fill: 'none', stroke: color('cross'), 'stroke-width': 1 + 13 * weight,
        'stroke-opacity': 0.15 + 0.75 * weight, 'stroke-linecap': 'round', 'data-ribbon': key}));
    });
  }
  const turned = shown
    ? state.heads.map(head => state.model.changes.turned.get(`${siteOf(state.box)} ${head} ${query}`)) : [];
  const tokens = (ids, top, stack, role, label) => {
    svg.append(svgElement('text', {class: 'label', x: 2, y: top - 22}, label));
    names(ids).forEach((name, i) => {
      const boxWidth = Math.min(width / ids.length - 5, 110);
      const isQuery = role === 'query' && i === query;
      const isHidden = role === 'key' && shown && i >= view.rows[query].keys.length;
      const isTurned = role === 'key' && turned.includes(i);
      const group = svgElement('g', {
        class: 'token', role: 'button', tabindex: 0, [`data-${role}`]: i, 'aria-pressed': isQuery || isTurned,
        'aria-label': `${role} ${i + 1}: ${name}`, opacity: isHidden ? 0.35 : 1});
      group.append(
        svgElement('rect', {
          x: x(i, ids.length) - boxWidth / 2, y: top - 15, width: boxWidth, height: 29, rx: 6, stroke: hue[stack],
          'stroke-width': isQuery || isTurned ? 3 : 1.2, 'stroke-dasharray': isTurned ? '5 3' : 'none'}),
        svgElement('text', {
          x: x(i, ids.length), y: top + 5,
          style: `font-size:${Math.min(15, 1.75 * boxWidth / Math.max(3, name.length))}px`}, name));
      onActivate(group, () => role === 'query' ? actions.chooseRow(view.queryStack, i) : actions.chooseKey(i));
      svg.append(group);
    });
  };
  const labels = {encoder: 'English', decoder: 'German so far'};
  tokens(view.keys, keyY, view.keyStack, 'key', shown ? `${labels[view.keyStack]} (keys)` : labels.encoder);
  tokens(view.queries, queryY, view.queryStack, 'query',
    shown ? `${labels[view.queryStack]} (queries)` : labels.decoder);
  const box = svg.parentElement;
  box.scrollLeft = x(query, view.queries.length) - box.clientWidth / 2;
  const note = byId('attention-note');
  note.textContent = shown
    ? 'Choose a query below. Drag a ribbon or the query to another key (or choose the key), and the selected heads '
      + 'attend to it alone: the model computes everything again.'
    : 'Open an attention box of the model to see its ribbons.';
  if (shown && state.box.endsWith('cross') && state.alignment)
    note.textContent += ' Dashed green: the words that truly belong together, by the grammar that made this sentence.';
  else if (shown && state.box.endsWith('cross'))
    note.textContent += ' The sentences under Examples also show the true alignment.';
}

// The path from the query to the pointer, for a ribbon that is dragged.
export function draggedRibbon(state, {clientX, clientY}) {
  const svg = byId('ribbons');
  const to = new DOMPoint(clientX, clientY).matrixTransform(svg.getScreenCTM().inverse());
  const query = svg.querySelector('[data-query][aria-pressed="true"] rect').getBBox();
  const from = query.x + query.width / 2;
  const middle = (query.y + to.y) / 2;
  return `M${from} ${query.y}C${from} ${middle} ${to.x} ${middle} ${to.x} ${to.y}`;
}

export function drawHeads(state, actions) {
  const nHeads = state.model.config.n_heads;
  byId('heads').replaceChildren(...[...Array(nHeads).keys()].map(head => element('button', {
    type: 'button', textContent: `Head ${head + 1}`, onclick: () => actions.toggleHead(head),
    attributes: {'aria-pressed': state.heads.includes(head)}})));
  const off = state.heads.every(head => state.model.changes.off.has(`${siteOf(state.box)} ${head}`));
  const what = state.heads.length > 1 ? 'these heads' : 'this head';
  byId('switch-off').textContent = `Switch ${what} ${off ? 'on' : 'off'}`;
}

// --- candidates

export function drawCandidates(state, actions) {
  const node = state.visible[state.targetRow];
  const step = node.position;
  const name = state.tokenizer.name(node.id);
  byId('candidates-title').textContent = `Next token after “${name}”`;
  const settings = state.method === 'sampling' ? state.settings : {};
  const candidates = samplingDistribution(node.logProbs, settings).slice(0, 8);
  byId('candidate-list').replaceChildren(...candidates.map(({id, prob}) => {
    const isChosen = state.tokens[step] === id;
    return element('button', {
      type: 'button', className: isChosen ? 'candidate chosen' : 'candidate', onclick: () => actions.force(step, id),
      attributes: {'data-id': id, ...(isChosen ? {'aria-current': 'true'} : {})}},
    element('b', {textContent: state.tokenizer.name(id)}),
    element('span', {}, element('i', {attributes: {style: `width:${100 * prob}%`}})),
    element('span', {className: 'number', textContent: `${(100 * prob).toFixed(2)} %`}));
  }));
}

// --- the inspector

function strip(vector, largest = Math.max(...vector.map(Math.abs))) {
  const canvas = element('canvas', {className: 'strip', width: vector.length, height: 1,
    attributes: {role: 'img', 'aria-label': `${vector.length} numbers, the largest ${largest.toFixed(2)}`}});
  const context = canvas.getContext('2d');
  const image = context.createImageData(vector.length, 1);
  const [positive, negative, zero] = ['positive', 'negative', 'card'].map(name => rgb(color(name)));
  vector.forEach((value, i) => {
    const share = largest ? Math.min(1, Math.abs(value) / largest) : 0;
    const hue = value > 0 ? positive : negative;
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = zero[c] + (hue[c] - zero[c]) * share;
    image.data[4 * i + 3] = 255;
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

// A box in which something wide scrolls, also with the keyboard.
const scroller = (label, content) => element('div', {
  className: 'scroll', tabIndex: 0, attributes: {role: 'region', 'aria-label': label}}, content);

const minus = text => text.replace('-', '−');
const firstNumbers = vector =>
  `${[...vector.slice(0, 6)].map(value => minus(value.toFixed(2))).join('  ')} … (${vector.length})`;

// Rows of a name, a strip of colors, and the first numbers.
function flow(rows) {
  const cells = rows.flatMap(([name, vector]) => [
    element('span', {className: 'note', textContent: name}),
    element('div', {}, strip(vector), element('div', {className: 'values', textContent: firstNumbers(vector)}))]);
  return element('div', {className: 'flow'}, ...cells);
}

function moments(vector) {
  const mean = vector.reduce((a, b) => a + b, 0) / vector.length;
  const variance = vector.reduce((sum, value) => sum + (value - mean) ** 2, 0) / vector.length;
  return `mean ${minus(mean.toFixed(2))}, standard deviation ${Math.sqrt(variance).toFixed(2)}`;
}

const EQUATIONS = {
  embedding: 'x = √d_model · E[token] + PE[position]',
  self: 'softmax(QKᵀ / √d_k) V',
  cross: 'softmax(QKᵀ / √d_k) V',
  norm1: 'LayerNorm(x + sublayer(x))',
  norm2: 'LayerNorm(x + sublayer(x))',
  norm3: 'LayerNorm(x + sublayer(x))',
  feedForward: 'max(0, xW₁ + b₁) W₂ + b₂',
  out: 'one vector for each source token',
  logits: 'logits = E x',
  softmax: 'softmax(logits)',
};

const EXPLANATIONS = {
  embedding: 'A token’s row of the embedding matrix, times √128, plus a vector that depends only on the position.',
  self: 'The query is compared with every key. The softmax turns the scores into weights that sum to 1, and the '
    + 'output is the weighted sum of the values.',
  cross: 'Queries come from the decoder; keys and values come from the encoder’s output.',
  norm1: 'The sublayer’s output is added to its input; layer normalization then rescales the sum.',
  norm2: 'The sublayer’s output is added to its input; layer normalization then rescales the sum.',
  norm3: 'The sublayer’s output is added to its input; layer normalization then rescales the sum.',
  feedForward: 'The same two linear layers work on each position alone. ReLU sets negative values to 0.',
  out: 'What the decoder knows about the source. Both decoder layers read these vectors.',
  logits: 'The decoder’s last vector, multiplied with every row of the embedding matrix (the weights are tied): '
    + 'one score for each of the 1,000 tokens.',
  softmax: 'Probabilities of the next token. In training, label smoothing gave the right token 90 % and spread the '
    + 'rest over all tokens. So even a certain model rarely goes far above 90 %.',
};

function inspectEmbedding(state, stack, row) {
  const embedding = stack === 'encoder' ? state.source.embeddings[row] : state.visible[row].embedding;
  const id = stack === 'encoder' ? state.source.ids[row] : state.visible[row].id;
  const body = [];
  if (stack === 'encoder' && row < state.words.length) {
    const word = state.words[row];
    const steps = state.tokenizer.merges(word);
    const rows = steps.map(pieces => element('div', {className: 'pieces'},
      ...pieces.map(piece => element('span', {textContent: piece === null ? '⁇' : piece.replace('▁', '·')}))));
    body.push(element('p', {className: 'note', textContent:
      `Byte-pair encoding of “${word.replace('▁', '')}”: ${steps.length - 1} merges, from characters to tokens. `
      + '· marks the beginning of a word.'}), ...rows);
  }
  body.push(element('p', {textContent: `Token id ${id}, position ${row} (positions count from 0).`}), flow([
    [`E[${id}] · √128`, embedding.token], [`PE[${row}]`, embedding.encoding], ['sum', embedding.sum]]));
  return body;
}

function inspectAttention(state, stack, row) {
  const {layer, part} = boxParts(state.box);
  const view = attentionView(state);
  const attention = view.rows[row];
  const head = state.heads.at(-1);
  const dK = state.model.config.d_model / state.model.config.n_heads;
  const ofHead = vector => vector.subarray(head * dK, (head + 1) * dK);
  const weights = attention.weights[head];
  const largest = Math.max(...weights);
  const header = ['key', `K (${dK})`, 'q·k / √32', 'softmax', 'weight', `V (${dK})`];
  const masked = view.keys.length - attention.keys.length;
  const rows = view.keys.map((id, key) => {
    const token = element('td', {className: 'token-cell', textContent: state.tokenizer.name(id)});
    if (key >= attention.keys.length)
      return element('tr', {}, token, element('td', {className: 'note', textContent: 'masked', colSpan: 5}));
    return element('tr', {className: weights[key] === largest ? 'best' : ''}, token,
      element('td', {attributes: {style: 'width:26%'}}, strip(ofHead(attention.keys[key]))),
      element('td', {className: 'number', textContent: minus(attention.scores[head][key].toFixed(2))}),
      element('td', {className: 'number', textContent: weights[key].toFixed(3)}),
      element('td', {attributes: {style: 'width:104px'}},
        element('span', {className: 'weight', attributes: {style: `width:${100 * weights[key]}px`}})),
      element('td', {attributes: {style: 'width:26%'}}, strip(ofHead(attention.values[key]))));
  });
  const table = element('table', {}, element('tr', {}, ...header.map(text => element('th', {textContent: text}))), ...rows);
  const record = stack === 'encoder' ? state.source.layers[layer][row] : state.visible[row].layers[layer];
  const input = part === 'cross' ? record.norm1.out : record.x;
  const body = [
    element('p', {textContent: `Head ${head + 1}, query “${state.tokenizer.name(view.queries[row])}”: `
      + `${attention.keys.length} keys${masked ? `, ${masked} more masked` : ''}.`}),
    flow([['input of the query', input], [`Q of head ${head + 1}`, ofHead(attention.query)]]),
    scroller('Keys, weights and values', table),
    flow([[`weighted sum of V, head ${head + 1}`, ofHead(attention.heads)],
      ['all four heads side by side', attention.heads], ['after the output projection', attention.out]])];
  return body;
}

function inspectNorm(record) {
  return [flow([['x, the residual connection', record.x], ['sublayer(x)', record.sublayer],
    ['x + sublayer(x)', record.sum], ['after layer normalization', record.out]]),
  element('p', {className: 'note', textContent:
    `Before: ${moments(record.sum)}. After: ${moments(record.out)}.`})];
}

function inspectFeedForward(record) {
  const active = record.hidden.filter(value => value > 0).length;
  return [flow([['input', record.x], [`hidden: ${active} of ${record.hidden.length} are above 0`, record.hidden],
    ['output', record.out]])];
}

function inspectOutput(state, part) {
  const node = state.visible[state.targetRow];
  const probs = softmax(node.logProbs);
  const best = topIndices(node.logits, 10);
  const header = ['token', 'id', 'logit', 'probability'];
  const rows = best.map(id => element('tr', {},
    element('td', {className: 'token-cell', textContent: state.tokenizer.name(id)}),
    element('td', {className: 'number', textContent: id}),
    element('td', {className: 'number', textContent: minus(node.logits[id].toFixed(2))}),
    element('td', {className: 'number', textContent: probs[id].toFixed(5)})));
  const entropy = -probs.reduce((sum, p) => p > 0 ? sum + p * Math.log(p) : sum, 0);
  const body = [scroller('Most probable tokens', element('table', {},
    element('tr', {}, ...header.map(text => element('th', {textContent: text}))), ...rows))];
  if (part === 'logits') body.unshift(flow([['decoder output', node.out], ['logits of all tokens', node.logits]]));
  else body.push(element('p', {className: 'note', textContent: `Entropy: ${entropy.toFixed(2)} nats. PAD and BOS are never allowed.`}));
  return body;
}

export function drawInspector(state) {
  const {stack, layer, part} = boxParts(state.box);
  const row = rowOf(state, stack);
  const ids = stack === 'encoder' ? state.source.ids : state.visible.map(node => node.id);
  const token = state.tokenizer.name(ids[row]);
  byId('inspector-title').textContent = `${boxName(state.box)}, at “${token}”`;
  const link = state.links[part];
  const places = link ? [' ', element('a', {href: link.page, target: '_top', textContent: link.title}), ' · ',
    element('a', {href: link.source, target: '_top', textContent: link.code})] : [];
  byId('inspector-text').replaceChildren(EXPLANATIONS[part], ...places);
  const record = layer === null ? null
    : stack === 'encoder' ? state.source.layers[layer][row][part] : state.visible[row].layers[layer][part];
  let body;
  if (part === 'embedding') body = inspectEmbedding(state, stack, row);
  else if (isAttention(state.box)) body = inspectAttention(state, stack, row);
  else if (part.startsWith('norm')) body = inspectNorm(record);
  else if (part === 'feedForward') body = inspectFeedForward(record);
  else if (part === 'out') body = [flow(state.source.out.map((vector, i) => [state.tokenizer.name(ids[i]), vector]))];
  else body = inspectOutput(state, part);
  byId('inspector-body').replaceChildren(
    element('p', {className: 'equation', textContent: EQUATIONS[part]}), ...body);
}

// --- all heads

function heatMap(view, head, hue) {
  const [nRows, nColumns] = [view.queries.length, view.keys.length];
  const canvas = element('canvas', {width: nColumns, height: nRows});
  const context = canvas.getContext('2d');
  const image = context.createImageData(nColumns, nRows);
  const parts = rgb(hue);
  view.rows.forEach((row, i) => row.weights[head].forEach((weight, j) => {
    const pixel = 4 * (i * nColumns + j);
    image.data.set([...parts, 255 * weight], pixel);
  }));
  context.putImageData(image, 0, 0);
  return canvas;
}

const MAP_ROWS = [['encoder', 'self', 'Encoder self-attention', 'encoder'],
  ['decoder', 'self', 'Masked decoder self-attention', 'decoder'], ['decoder', 'cross', 'Cross-attention', 'cross']];

export function drawMaps(state, actions) {
  const {n_layers: nLayers, n_heads: nHeads} = state.model.config;
  byId('map-list').replaceChildren(...MAP_ROWS.map(([stack, part, title, hue]) => {
    const maps = [];
    for (let layer = 0; layer < nLayers; layer++) {
      const box = `${stack}.${layer}.${part}`;
      const view = attentionView(state, box);
      for (let head = 0; head < nHeads; head++) {
        const off = state.model.changes.off.has(`${siteOf(box)} ${head}`);
        const name = `layer ${layer + 1}, head ${head + 1}`;
        maps.push(element('button', {
          type: 'button', className: off ? 'map off' : 'map', onclick: () => actions.chooseHead(box, head),
          attributes: {'aria-pressed': box === state.box && state.heads.includes(head), 'data-map': `${box} ${head}`,
            'aria-label': `${title}, ${name}${off ? ', off' : ''}`}},
        heatMap(view, head, color(hue)), element('span', {textContent: name})));
      }
    }
    return element('div', {}, element('div', {className: 'note', textContent: title}),
      element('div', {className: 'map-row'}, ...maps));
  }));
}

// --- the beam

export function drawBeam(state) {
  byId('beam').hidden = !state.rounds;
  if (!state.rounds) return;
  const svg = byId('beam-tree');
  const {rounds, tokenizer, settings} = state;
  const nSteps = rounds.length;
  const step = Math.max(92, (svg.parentElement.clientWidth - 20) / (nSteps + 1));
  const rowHeight = 40;
  const height = rowHeight * Math.max(...rounds.map(round => round.length)) + 30;
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${step * (nSteps + 1)} ${height}`);
  svg.setAttribute('width', step * (nSteps + 1));
  svg.setAttribute('height', height);
  const winner = new Set();
  for (let hypothesis = state.best; hypothesis; hypothesis = hypothesis.parent) winner.add(hypothesis.tokens.join(' '));
  const places = new Map();
  rounds.forEach((round, r) => round.forEach((hypothesis, rank) => {
    const place = [step * (r + 1) - 30, 24 + rowHeight * rank];
    const wins = winner.has(hypothesis.tokens.join(' '));
    const hue = color(wins ? 'decoder' : 'soft');
    const from = places.get(hypothesis.parent) ?? [8, 24];
    svg.append(svgElement('path', {
      d: `M${from[0]} ${from[1]}C${from[0] + 26} ${from[1]} ${place[0] - 52} ${place[1]} ${place[0] - 34} ${place[1]}`,
      fill: 'none', stroke: hue, 'stroke-width': wins ? 3 : 1.1, 'stroke-opacity': wins ? 1 : 0.6}));
    svg.append(svgElement('text', {
      x: place[0], y: place[1] + 5, style: `fill:${hue};font-weight:${wins ? 700 : 400};font-size:13px`},
    tokenizer.name(hypothesis.id)));
    const score = hypothesis.finished ? `score ${hypothesis.score.toFixed(2)}` : hypothesis.logProb.toFixed(2);
    svg.append(svgElement('text', {class: 'score', x: place[0], y: place[1] + 18}, minus(score)));
    places.set(hypothesis, [place[0] + 32, place[1]]);
  }));
  byId('beam-note').textContent = `At each step, the ${settings.beamSize} most probable hypotheses survive. `
    + 'The thick path is the winner. Below each token is the log-probability of its hypothesis; below <eos>, the score '
    + 'of the finished hypothesis: its log-probability, divided by the length penalty.';
  const header = ['translation', 'tokens', 'log-probability', 'score'];
  byId('beam-table').replaceChildren(
    element('tr', {}, ...header.map(text => element('th', {textContent: text}))),
    ...state.hypotheses.map(hypothesis => element('tr', {},
      element('td', {className: 'token-cell', textContent: tokenizer.decode(hypothesis.tokens), lang: 'de'}),
      element('td', {className: 'number', textContent: hypothesis.tokens.length}),
      element('td', {className: 'number', textContent: minus(hypothesis.logProb.toFixed(3))}),
      element('td', {className: 'number', textContent: minus(hypothesis.score.toFixed(3))}))));
}

// A text with the words marked that another text lacks.
export function marked(text, other) {
  const words = text.split(' ');
  const others = other.split(' ');
  const left = new Map();
  for (const word of others) left.set(word, (left.get(word) ?? 0) + 1);
  return words.flatMap((word, i) => {
    const known = left.get(word) > 0;
    if (known) left.set(word, left.get(word) - 1);
    const shown = known ? word : element('mark', {className: 'glow', textContent: word});
    return i ? [' ', shown] : [shown];
  });
}
