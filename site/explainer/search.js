// Greedy decoding, sampling and beam search, as in the project's module `decoding`.
import {BOS, EOS, pathOf} from './model.js';

const maxLength = (model, source) => Math.min(source.ids.length + 50, model.config.max_len);

// Wu et al. (2016), equation 14
export const normalizedScore = (logProb, length, lengthPenalty) =>
  logProb / ((5 + length) / 6) ** lengthPenalty;

// Indices of the largest finite values, largest first.
export function topIndices(values, count) {
  const top = [];
  for (let i = 0; i < values.length; i++) {
    if (values[i] === -Infinity) continue;
    if (top.length === count && values[i] <= values[top[count - 1]]) continue;
    let rank = top.length;
    while (rank > 0 && values[top[rank - 1]] < values[i]) rank--;
    top.splice(rank, 0, i);
    if (top.length > count) top.pop();
  }
  return top;
}

// Candidates with their probabilities, most probable first, after temperature, top-k, then top-p.
export function samplingDistribution(logProbs, {temperature = 1, topK = 0, topP = 1} = {}) {
  const order = topIndices(logProbs, logProbs.length);
  const largest = logProbs[order[0]];
  let probs = order.map(id => Math.exp((logProbs[id] - largest) / temperature));
  const normalize = () => {
    const total = probs.reduce((a, b) => a + b, 0);
    probs = probs.map(p => p / total);
  };
  normalize();
  if (topK) {
    probs = probs.slice(0, topK);
    normalize();
  }
  let totalBefore = 0;
  probs = probs.filter(p => {
    const kept = totalBefore < topP;
    totalBefore += p;
    return kept;
  });
  normalize();
  return probs.map((prob, rank) => ({id: order[rank], prob}));
}

// Random numbers in [0, 1) that depend on the seed alone (mulberry32).
export function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = state + 0x6d2b79f5 >>> 0;
    let t = Math.imul(state ^ state >>> 15, state | 1);
    t ^= t + Math.imul(t ^ t >>> 7, t | 61);
    return ((t ^ t >>> 14) >>> 0) / 2 ** 32;
  };
}

export const chooseBest = logProbs => topIndices(logProbs, 1)[0];

export function chooseRandomly(settings) {
  const random = randomNumbers(settings.seed);
  return logProbs => {
    const candidates = samplingDistribution(logProbs, settings);
    let left = random();
    for (const {id, prob} of candidates) {
      left -= prob;
      if (left < 0) return id;
    }
    return candidates.at(-1).id;
  };
}

// Translate token by token. `path` has a node for each input token (BOS first), `tokens` what was chosen after it.
export function generate(model, source, choose, prefix = []) {
  const limit = maxLength(model, source);
  const tokens = [];
  let logProb = 0;
  let path = model.decode(source, null, [BOS]);
  for (;;) {
    const node = path.at(-1);
    const chosen = choose(node.logProbs); // drawn even where the prefix decides: same draws afterwards
    const token = tokens.length < prefix.length ? prefix[tokens.length] : chosen;
    logProb += node.logProbs[token];
    tokens.push(token);
    if (token === EOS || tokens.length === limit) return {path, tokens, logProb};
    if (model.changes.causalMask) path = [...path, ...model.decode(source, node, [token])];
    else path = model.decode(source, null, [BOS, ...tokens]); // every state depends on all tokens
  }
}

// Each round lists the candidates; `tree` marks those that stay active.
export function beamSearch(model, source, {beamSize = 4, lengthPenalty = 0.6, nBest = 1, prefix = []} = {}) {
  const limit = maxLength(model, source);
  const nodes = model.decode(source, null, [BOS, ...prefix]);
  let logProb = 0;
  prefix.forEach((token, i) => { logProb += nodes[i].logProbs[token]; });
  let active = [{node: nodes.at(-1), tokens: prefix, logProb, parent: null}];
  let finished = [];
  const rounds = [];
  for (let length = prefix.length + 1; length <= limit; length++) {
    const vocabSize = model.config.vocab_size;
    const totals = new Float64Array(active.length * vocabSize);
    active.forEach((hypothesis, row) => {
      for (let id = 0; id < vocabSize; id++)
        totals[row * vocabSize + id] = hypothesis.logProb + hypothesis.node.logProbs[id];
    });
    const candidates = topIndices(totals, 2 * beamSize).map(index => {
      const parent = active[Math.floor(index / vocabSize)];
      const id = index % vocabSize;
      return {id, parent, tokens: [...parent.tokens, id], logProb: totals[index]};
    });
    for (const candidate of candidates.slice(0, beamSize))
      if (candidate.id === EOS) {
        candidate.score = normalizedScore(candidate.logProb, length, lengthPenalty);
        candidate.finished = true;
        finished.push(candidate);
      }
    finished = finished.sort((a, b) => b.score - a.score).slice(0, nBest);
    active = candidates.filter(candidate => candidate.id !== EOS).slice(0, beamSize);
    rounds.push([...candidates.slice(0, beamSize).filter(candidate => candidate.finished), ...active]);
    if (finished.length === nBest) {
      const bound = normalizedScore(active[0].logProb, limit, lengthPenalty);
      if (beamSize === 1 || finished[nBest - 1].score >= bound) break;
    }
    if (length < limit)
      for (const hypothesis of active)
        [hypothesis.node] = model.decode(source, hypothesis.parent.node, [hypothesis.id]);
  }
  for (const hypothesis of active.slice(0, nBest - finished.length)) { // truncated: without EOS
    hypothesis.score = normalizedScore(hypothesis.logProb, limit, lengthPenalty);
    finished.push(hypothesis);
  }
  const hypotheses = finished.map(found =>
    ({...found, path: pathOf(found.parent.node)}));
  return {...hypotheses[0], hypotheses, rounds};
}
