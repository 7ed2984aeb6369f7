// The state of the page, and what happens when a visitor acts.
import {BOS, EOS, Model, UNK, noChanges, readSafetensors} from './model.js';
import {beamSearch, chooseBest, chooseRandomly, generate} from './search.js';
import {Tokenizer} from './tokenizer.js';
import {TOURS} from './tours.js';
import {
  attentionView, boxParts, byId, draggedRibbon, drawBeam, drawCandidates, drawDiagram, drawHeads, drawInspector, drawMaps,
  drawRibbons, element, isAttention, marked, rowOf, siteOf, svgElement} from './views.js';

const data = JSON.parse(byId('data').textContent);
const bytes = Uint8Array.from(atob(data.weights), character => character.charCodeAt(0));
const model = new Model(data.config, readSafetensors(bytes.buffer));
const tokenizer = new Tokenizer(data.tokenizer);
const knownWords = new Set(data.words);

const SETTINGS = {beamSize: 4, lengthPenalty: 0.6, temperature: 1, topK: 0, topP: 1, seed: 1};
// Sections that an embedded page shows: explainer.html#view=attention
const VIEWS = {
  attention: ['input', 'player', 'stage', 'attention', 'inspector', 'maps'],
  positions: ['input', 'player', 'stage', 'model', 'attention', 'inspector'],
  model: ['input', 'player', 'stage', 'model', 'attention', 'inspector'],
  tokens: ['input', 'stage', 'model', 'inspector'],
  predictions: ['input', 'player', 'stage', 'candidates', 'inspector'],
  decoding: ['input', 'player', 'stage', 'candidates', 'beam'],
  comparison: ['input', 'player', 'stage', 'changes'],
  translator: ['input', 'player', 'stage', 'model', 'attention', 'candidates', 'changes'],
  tour: ['input', 'tour', 'player', 'stage', 'model', 'attention', 'candidates', 'maps', 'changes'],
};

const state = {
  model, tokenizer, links: data.links, text: '', box: 'decoder.1.cross', heads: [2], sourceRow: 0, targetRow: 0,
  method: 'greedy', settings: {...SETTINGS}, prefix: [], branches: [], cursor: 0, tour: null, timer: null,
};

// --- computing

function translate(prefix = state.prefix) {
  const source = model.encode([...tokenizer.encode(state.text), EOS]);
  if (state.method === 'beam') {
    const {beamSize, lengthPenalty} = state.settings;
    return {source, ...beamSearch(model, source, {beamSize, lengthPenalty, nBest: beamSize, prefix})};
  }
  const choose = state.method === 'sampling' ? chooseRandomly(state.settings) : chooseBest;
  return {source, ...generate(model, source, choose, prefix)};
}

const isChanged = () => {
  const {turned, off, positions, causalMask} = model.changes;
  return turned.size > 0 || off.size > 0 || !positions || !causalMask || state.prefix.length > 0;
};

// What the model says without changes.
function unchangedTranslation() {
  const changes = model.changes;
  model.changes = noChanges();
  const found = translate([]);
  model.changes = changes;
  return tokenizer.decode(found.tokens);
}

// For sentences of the grammar: the word of each token on both sides, and which words belong together.
function findAlignment() {
  const example = data.examples.find(({src}) => src === state.text);
  if (!example || tokenizer.decode(state.tokens) !== example.tgt) return null;
  const wordOfTokens = (words, ids) => {
    const places = [];
    let word = 0;
    let rest = words[0];
    for (const id of ids) {
      if (id === EOS) break;
      const piece = tokenizer.tokens[id].replace('▁', '');
      if (!rest) rest = words[++word];
      places.push(word);
      rest = (rest ?? '').slice(piece.length);
    }
    return places;
  };
  return {src: wordOfTokens(example.srcWords, state.source.ids), tgt: wordOfTokens(example.tgtWords, state.tokens),
          pairs: example.alignment};
}

function compute() {
  const start = performance.now();
  const found = translate();
  state.milliseconds = performance.now() - start;
  state.source = found.source;
  state.tokens = found.tokens;
  state.path = found.path;
  state.logProb = found.logProb;
  state.rounds = found.rounds ?? null;
  state.hypotheses = found.hypotheses ?? [];
  state.best = found.rounds ? found.hypotheses[0] : null;
  state.words = tokenizer.words(state.text).flatMap(word => tokenizer.encodeWord(word).map(() => word));
  state.alignment = findAlignment();
  state.comparison = isChanged() ? unchangedTranslation() : null;
}

// --- drawing

const linkOf = params => `#${new URLSearchParams(params)}`;

function setCursor(cursor) {
  state.cursor = Math.max(0, Math.min(cursor, state.tokens.length));
  const nVisible = Math.min(state.cursor + 1, state.path.length);
  state.visible = state.path.slice(0, nVisible);
  state.targetRow = Math.min(nVisible - 1, state.path.length - 1);
  state.sourceRow = Math.min(state.sourceRow, state.source.ids.length - 1);
}

function drawTranslation() {
  const done = tokenizer.decode(state.tokens.slice(0, state.cursor));
  const all = tokenizer.decode(state.tokens);
  const node = byId('translation');
  const text = element('span');
  if (state.comparison !== null && state.cursor === state.tokens.length) text.append(...marked(done, state.comparison));
  else text.textContent = done;
  node.replaceChildren(text, element('span', {className: 'to-come', textContent: done === all ? '' : ' …'}));
  node.dataset.finished = state.cursor === state.tokens.length;
  const comparison = byId('comparison');
  comparison.hidden = state.comparison === null;
  if (state.comparison !== null)
    comparison.replaceChildren('Without your changes: ', ...marked(state.comparison, all));
  byId('cursor').max = state.tokens.length;
  byId('cursor').value = state.cursor;
  byId('cursor').setAttribute('aria-valuetext', `${state.cursor} of ${state.tokens.length} tokens`);
  byId('time').textContent =
    `${state.cursor} of ${state.tokens.length} tokens · all computed in ${state.milliseconds.toFixed(0)} ms`;
  byId('play').textContent = state.timer ? 'Pause' : 'Play';
  for (const [id, disabled] of [['first', state.cursor === 0], ['back', state.cursor === 0],
    ['next', state.cursor === state.tokens.length], ['last', state.cursor === state.tokens.length]])
    byId(id).disabled = disabled;
}

function drawControls() {
  byId('method').value = state.method;
  for (const group of document.querySelectorAll('[data-method]')) group.hidden = group.dataset.method !== state.method;
  for (const name of ['beamSize', 'lengthPenalty', 'temperature', 'topK', 'topP']) {
    byId(name).value = state.settings[name];
    byId(`${name}-value`).textContent = name === 'topK' && !state.settings.topK ? 'all' : state.settings[name];
  }
  byId('positions').checked = model.changes.positions;
  byId('causalMask').checked = model.changes.causalMask;
  for (const option of byId('method').options)
    option.disabled = option.value === 'beam' && !model.changes.causalMask;
  const unknown = [...new Set(state.text.match(/[\p{L}]+/gu) ?? [])]
    .filter(word => !knownWords.has(word) && !knownWords.has(word[0].toLowerCase() + word.slice(1)));
  byId('unknown').hidden = unknown.length === 0;
  byId('unknown').textContent = unknown.length
    ? `Not in the vocabulary that the model was trained on: ${unknown.join(', ')}. It will guess.` : '';
}

function describeChanges() {
  const {turned, off, positions, causalMask} = model.changes;
  const items = [];
  const place = (stack, layer, head) => `${stack === 'cross' ? 'cross-attention' : stack}, layer ${+layer + 1}, head ${+head + 1}`;
  for (const [key, target] of turned) {
    const [stack, layer, head, query] = key.split(' ');
    items.push([`${place(stack, layer, head)}: query ${+query + 1} attends to key ${target + 1} alone`,
      () => turned.delete(key)]);
  }
  for (const key of off) items.push([`${place(...key.split(' '))} is off`, () => off.delete(key)]);
  if (!positions) items.push(['no positions', () => { model.changes.positions = true; }]);
  if (!causalMask) items.push(['no causal mask: every token sees the later ones',
    () => { model.changes.causalMask = true; }]);
  if (state.prefix.length)
    items.push([`the translation begins with “${tokenizer.decode(state.prefix)}”`, () => { state.prefix = []; }]);
  return items;
}

function drawChanges() {
  const items = describeChanges();
  byId('reset').disabled = items.length === 0;
  byId('change-list').replaceChildren(items.length
    ? element('ul', {className: 'plain'}, ...items.map(([text, undo]) => element('li', {}, `${text} `,
      element('button', {type: 'button', className: 'word', textContent: 'undo',
        attributes: {'aria-label': `undo: ${text}`}, onclick: () => { undo(); update(); }}))))
    : element('p', {className: 'note', textContent: 'Nothing is changed. Turn or switch off a head, lift the mask, '
      + 'remove the positions, or choose another token.'}));
  byId('branch-list').replaceChildren(...(state.branches.length ? [
    element('p', {className: 'note', textContent: 'Branches of this sentence, with their log-probabilities:'}),
    element('ul', {className: 'plain'}, ...state.branches.map(branch => element('li', {},
      element('button', {type: 'button', className: 'word', textContent: branch.text, lang: 'de',
        attributes: {'aria-pressed': branch.prefix.join() === state.prefix.join()},
        onclick: () => { state.prefix = branch.prefix; update(); }}),
      element('span', {className: 'note', textContent: ` ${branch.logProb.toFixed(3).replace('-', '−')}`}))))] : []));
  const python = ['from annotated_transformer.translator import Translator', '', 'translator = Translator.load()'];
  const prefix = state.prefix.length ? `, prefix=${JSON.stringify(tokenizer.decode(state.prefix))}` : '';
  const text = JSON.stringify(state.text);
  const {beamSize, lengthPenalty, temperature, topK, topP, seed} = state.settings;
  if (state.method === 'sampling')
    python.push(`translator.sample(${text}, temperature=${temperature}, top_k=${topK}, top_p=${topP}, seed=${seed})`,
      '# other random numbers: the draws differ');
  else
    python.push(`translator.translate(${text}, beam_size=${state.method === 'beam' ? beamSize : 1}`
      + `${state.method === 'beam' ? `, length_penalty=${lengthPenalty}` : ''}${prefix})`);
  byId('python').textContent = python.join('\n');
}

// Draw what depends on the step, the box, the heads or the rows.
function draw() {
  drawTranslation();
  drawDiagram(state, chooseBox);
  if (isAttention(state.box)) drawHeads(state, actions);
  drawRibbons(state, actions);
  drawCandidates(state, actions);
  drawInspector(state);
  drawMaps(state, actions);
}

// Compute again after a change, and draw everything. The cursor goes to the end unless told otherwise.
function update({cursor = null} = {}) {
  stop();
  compute();
  setCursor(cursor ?? state.tokens.length);
  drawControls();
  draw();
  drawBeam(state);
  drawChanges();
}

// --- acting

function chooseBox(box) {
  state.box = box;
  draw();
  document.querySelector(`[data-box='${box}']`)?.focus();
}

function recordBranch() {
  const text = tokenizer.decode(state.tokens);
  if (!state.branches.some(branch => branch.text === text && branch.prefix.join() === state.prefix.join()))
    state.branches.push({prefix: state.prefix, text, logProb: state.logProb});
}

const actions = {
  chooseRow(stack, row) {
    if (stack === 'encoder') state.sourceRow = row;
    else state.targetRow = row;
    draw();
  },
  // The selected heads attend to `key` alone, or no longer.
  chooseKey(key) {
    if (!isAttention(state.box)) return;
    const view = attentionView(state);
    const query = rowOf(state, view.queryStack);
    if (key >= view.rows[query].keys.length) return;
    const {turned} = model.changes;
    const names = state.heads.map(head => `${siteOf(state.box)} ${head} ${query}`);
    const already = names.every(name => turned.get(name) === key);
    for (const name of names) {
      if (already) turned.delete(name);
      else turned.set(name, key);
    }
    const {sourceRow, targetRow} = state;
    update();
    state.sourceRow = sourceRow;
    state.targetRow = Math.min(targetRow, state.visible.length - 1);
    draw();
    document.querySelector(`#ribbons [data-key='${key}']`)?.focus();
  },
  toggleHead(head) {
    const heads = state.heads.includes(head) ? state.heads.filter(other => other !== head) : [...state.heads, head];
    state.heads = heads.length ? heads : [head];
    draw();
    byId('heads').children[head].focus();
  },
  chooseHead(box, head) {
    state.box = box;
    state.heads = [head];
    draw();
    document.querySelector(`[data-map='${box} ${head}']`)?.focus();
  },
  force(step, id) {
    if (!state.branches.length) recordBranch();
    state.prefix = id === EOS ? [...state.tokens.slice(0, step), EOS] : [...state.tokens.slice(0, step), id];
    if (state.method === 'beam' && id === EOS) state.method = 'greedy';
    update();
    recordBranch();
    drawChanges();
  },
};

function stop() {
  clearInterval(state.timer);
  state.timer = null;
}

function play() {
  if (state.timer) stop();
  else {
    if (state.cursor === state.tokens.length) setCursor(0);
    state.timer = setInterval(() => {
      setCursor(state.cursor + 1);
      if (state.cursor === state.tokens.length) stop();
      draw();
    }, 700);
  }
  draw();
}

function moveTo(cursor) {
  stop();
  setCursor(cursor);
  draw();
}

function setText(text, {keep = false} = {}) {
  state.text = text;
  byId('text').value = text;
  byId('examples').value = data.examples.some(({src}) => src === text) ? text : '';
  if (!keep) model.changes = noChanges();
  state.prefix = [];
  state.branches = [];
  state.sourceRow = 0;
}

// --- tours

function showTourStep() {
  const {name, place} = state.tour;
  const step = TOURS[name][place];
  model.changes = noChanges();
  state.method = step.method ?? 'greedy';
  state.settings = {...SETTINGS};
  setText(step.text);
  const ids = [...tokenizer.encode(step.text), EOS];
  const positionOf = token => ids.findIndex(id => tokenizer.name(id) === token);
  for (const [stack, layer, head, query, key] of step.turn ?? [])
    model.changes.turned.set(`${stack} ${layer} ${head} ${positionOf(query)}`, positionOf(key));
  model.changes.positions = step.positions ?? true;
  state.box = step.box;
  state.heads = step.heads ?? [0];
  update();
  if (step.source) state.sourceRow = positionOf(step.source);
  if (step.predicts) moveTo(state.tokens.findIndex(id => tokenizer.name(id) === step.predicts));
  draw();
  byId('tour').hidden = false;
  byId('tours').value = name;
  byId('tour-text').textContent = step.say;
  byId('tour-place').textContent = `${name}: ${place + 1} of ${TOURS[name].length}`;
  byId('tour-back').disabled = place === 0;
  byId('tour-next').textContent = place + 1 === TOURS[name].length ? 'Finish' : 'Next';
}

function startTour(name) {
  if (!TOURS[name]) return endTour();
  state.tour = {name, place: 0};
  showTourStep();
}

function endTour() {
  state.tour = null;
  byId('tour').hidden = true;
  byId('tours').value = '';
}

// --- addresses

function currentAddress() {
  const {turned, off, positions, causalMask} = model.changes;
  const params = {text: state.text, box: state.box, heads: state.heads.join(), method: state.method,
    source: state.sourceRow, cursor: state.cursor};
  for (const [name, value] of Object.entries(state.settings))
    if (value !== SETTINGS[name]) params[name] = value;
  if (turned.size) params.turned = [...turned].map(([key, target]) => `${key} ${target}`).join();
  if (off.size) params.off = [...off].join();
  if (!positions) params.positions = 0;
  if (!causalMask) params.causalMask = 0;
  if (state.prefix.length) params.prefix = state.prefix.join();
  return linkOf(params);
}

function readAddress() {
  const params = new URLSearchParams(location.hash.slice(1));
  const list = name => (params.get(name) || '').split(',').filter(Boolean);
  const {n_layers: nLayers, n_heads: nHeads, vocab_size: vocabSize} = data.config;
  const inRange = (value, limit) => Number.isInteger(value) && value >= 0 && value < limit;
  setText((params.get('text') || data.examples[0].src).slice(0, 300));
  for (const name of Object.keys(SETTINGS)) {
    const value = Number(params.get(name) ?? NaN);
    const field = byId(name);
    if (Number.isFinite(value) && (!field || value >= field.min && value <= field.max)) state.settings[name] = value;
  }
  if (['greedy', 'beam', 'sampling'].includes(params.get('method'))) state.method = params.get('method');
  const box = params.get('box') ?? '';
  if (/^(encoder\.(embedding|out|[01]\.(self|norm[12]|feedForward))|decoder\.(embedding|logits|softmax|[01]\.(self|cross|norm[123]|feedForward)))$/.test(box))
    state.box = box;
  const heads = list('heads').map(Number).filter(head => inRange(head, nHeads));
  if (heads.length) state.heads = heads;
  const site = /^(encoder|decoder|cross) \d+ \d+/;
  for (const item of list('turned')) {
    const numbers = item.split(' ').slice(1).map(Number);
    if (site.test(item) && numbers.length === 4 && numbers.every(Number.isInteger))
      model.changes.turned.set(item.split(' ').slice(0, 4).join(' '), numbers[3]);
  }
  for (const item of list('off')) if (site.test(item)) model.changes.off.add(item);
  model.changes.positions = params.get('positions') !== '0';
  model.changes.causalMask = params.get('causalMask') !== '0';
  if (!model.changes.causalMask && state.method === 'beam') state.method = 'greedy';
  state.prefix = list('prefix').map(Number).filter(id => inRange(id, vocabSize) && id !== BOS);
  const view = VIEWS[params.get('view')];
  if (view) {
    document.body.dataset.view = params.get('view');
    for (const id of view) byId(id).classList.add('shown');
    byId('stage').classList.toggle('one-column', !view.includes('model'));
  }
  const themes = ['light', 'dark'];
  setTheme(themes.includes(params.get('theme')) ? params.get('theme') : null);
  update();
  const source = Number(params.get('source') ?? NaN);
  if (inRange(source, state.source.ids.length)) state.sourceRow = source;
  const cursor = Number(params.get('cursor') ?? NaN);
  if (inRange(cursor, state.tokens.length + 1)) setCursor(cursor);
  draw();
  if (params.get('tour')) startTour(params.get('tour'));
}

// --- light and dark

const darkPreferred = matchMedia('(prefers-color-scheme: dark)');

function setTheme(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = theme ?? (darkPreferred.matches ? 'dark' : 'light');
}

// --- dragging a ribbon, or a query, to a key

const DRAG_DISTANCE = 10; // pixels; a shorter way is a click
let dragged = null;
byId('ribbons').addEventListener('pointerdown', event => {
  const query = event.target.closest('[data-query]');
  const ribbon = event.target.closest('[data-ribbon]');
  if (!isAttention(state.box) || !(query || ribbon)) return;
  if (query) {
    const view = attentionView(state);
    const row = Number(query.dataset.query);
    if (view.queryStack === 'encoder') state.sourceRow = row;
    else state.targetRow = row;
  }
  dragged = {x: event.clientX, y: event.clientY, line: null};
});
const dragDistance = event => Math.hypot(event.clientX - dragged.x, event.clientY - dragged.y);
addEventListener('pointermove', event => {
  if (!dragged || dragDistance(event) <= DRAG_DISTANCE) return;
  if (!dragged.line) {
    drawRibbons(state, actions); // the query may be a new one
    dragged.line = svgElement('path', {class: 'dragged'});
    byId('ribbons').append(dragged.line);
  }
  dragged.line.setAttribute('d', draggedRibbon(state, event));
});
function endDrag() {
  dragged?.line?.remove();
  dragged = null;
}
addEventListener('pointerup', event => {
  if (!dragged) return;
  const isDrag = dragDistance(event) > DRAG_DISTANCE;
  endDrag();
  const key = document.elementFromPoint(event.clientX, event.clientY)?.closest('#ribbons [data-key]');
  if (key && isDrag) actions.chooseKey(Number(key.dataset.key));
});
addEventListener('pointercancel', endDrag);

// --- the page

function fillChoices() {
  byId('examples').replaceChildren(element('option', {value: '', textContent: 'Choose …'}),
    ...data.examples.map(({src}) => element('option', {value: src, textContent: src})));
  byId('tours').replaceChildren(element('option', {value: '', textContent: 'Choose …'}),
    ...Object.keys(TOURS).map(name => element('option', {value: name, textContent: name})));
  byId('words').replaceChildren(...data.words.filter(word => /\p{L}/u.test(word)).map(word => element('button', {
    type: 'button', className: 'word', textContent: word, onclick: () => {
      const field = byId('text');
      field.value = `${field.value.replace(/[.\s]+$/, '')} ${word}.`.trim();
      field.dispatchEvent(new Event('input'));
    }})));
}

function listen() {
  const on = (id, event, action) => byId(id).addEventListener(event, action);
  on('form', 'submit', event => event.preventDefault());
  on('text', 'input', () => {
    const {value} = byId('text');
    endTour();
    setText(value, {keep: false});
    update();
  });
  on('examples', 'change', event => {
    if (!event.target.value) return;
    endTour();
    setText(event.target.value);
    update();
  });
  on('tours', 'change', event => startTour(event.target.value));
  on('tour-next', 'click', () => {
    if (state.tour.place + 1 === TOURS[state.tour.name].length) return endTour();
    state.tour.place++;
    showTourStep();
  });
  on('tour-back', 'click', () => {
    state.tour.place--;
    showTourStep();
  });
  on('tour-end', 'click', endTour);
  on('toggle-words', 'click', () => {
    byId('words').hidden = !byId('words').hidden;
    byId('toggle-words').setAttribute('aria-expanded', !byId('words').hidden);
  });
  on('first', 'click', () => moveTo(0));
  on('back', 'click', () => moveTo(state.cursor - 1));
  on('next', 'click', () => moveTo(state.cursor + 1));
  on('last', 'click', () => moveTo(state.tokens.length));
  on('play', 'click', play);
  on('cursor', 'input', () => moveTo(Number(byId('cursor').value)));
  on('method', 'change', () => {
    state.method = byId('method').value;
    update();
  });
  for (const name of ['beamSize', 'lengthPenalty', 'temperature', 'topK', 'topP'])
    on(name, 'input', () => {
      state.settings[name] = Number(byId(name).value);
      update();
    });
  on('again', 'click', () => {
    state.settings.seed++;
    update();
  });
  for (const name of ['positions', 'causalMask'])
    on(name, 'change', () => {
      model.changes[name] = byId(name).checked;
      if (!model.changes.causalMask && state.method === 'beam') state.method = 'greedy';
      update();
    });
  on('switch-off', 'click', () => {
    const names = state.heads.map(head => `${siteOf(state.box)} ${head}`);
    const {off} = model.changes;
    const allOff = names.every(name => off.has(name));
    for (const name of names) {
      if (allOff) off.delete(name);
      else off.add(name);
    }
    update();
  });
  on('reset', 'click', () => {
    model.changes = noChanges();
    state.prefix = [];
    state.branches = [];
    update();
  });
  on('share', 'click', async () => {
    history.replaceState(null, '', currentAddress());
    try {
      await navigator.clipboard.writeText(location.href);
      byId('shared').textContent = 'The link is in the clipboard.';
    } catch {
      byId('shared').textContent = 'The link is in the address bar.';
    }
  });
  darkPreferred.addEventListener('change', () => {
    setTheme(state.theme);
    draw();
    drawBeam(state);
  });
  addEventListener('message', event => { // the page that embeds this one tells its theme
    if (event.source !== parent || !['light', 'dark'].includes(event.data?.theme)) return;
    setTheme(event.data.theme);
    draw();
    drawBeam(state);
  });
  addEventListener('resize', () => {
    drawRibbons(state, actions);
    drawBeam(state);
  });
  addEventListener('hashchange', readAddress);
}

fillChoices();
listen();
readAddress();
window.explainer = {model, tokenizer, state, TOURS, generate, beamSearch, chooseBest, startTour, update, actions,
  ready: performance.now()}; // milliseconds after the page was asked for
