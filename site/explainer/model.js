// The forward pass of the shipped Transformer, with every intermediate result kept.
// A vector is a Float32Array; a sequence is an array of vectors. Sums are taken in doubles.

export const PAD = 0;
export const BOS = 1;
export const EOS = 2;
export const UNK = 3;

export function readSafetensors(buffer) {
  const headerSize = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, headerSize)));
  const tensors = {};
  for (const [name, tensor] of Object.entries(header)) {
    if (name === '__metadata__') continue;
    if (tensor.dtype !== 'F32') throw new Error(`${name} is ${tensor.dtype}, not F32`);
    const [start, end] = tensor.data_offsets;
    // copied, since the offset need not be a multiple of 4
    tensors[name] = new Float32Array(buffer.slice(8 + headerSize + start, 8 + headerSize + end));
  }
  return tensors;
}

function linear(weight, bias, x) {
  const nIn = x.length;
  const nOut = weight.length / nIn;
  const y = new Float32Array(nOut);
  for (let row = 0, w = 0; row < nOut; row++) {
    let sum0 = bias ? bias[row] : 0;
    let sum1 = 0;
    let sum2 = 0;
    let sum3 = 0;
    for (let i = 0; i < nIn; i += 4, w += 4) { // four sums are faster than one
      sum0 += weight[w] * x[i];
      sum1 += weight[w + 1] * x[i + 1];
      sum2 += weight[w + 2] * x[i + 2];
      sum3 += weight[w + 3] * x[i + 3];
    }
    y[row] = sum0 + sum1 + sum2 + sum3;
  }
  return y;
}

function layerNorm(x, gain, bias) {
  let mean = 0;
  for (const value of x) mean += value / x.length;
  let variance = 0;
  for (const value of x) variance += (value - mean) ** 2 / x.length;
  const std = Math.sqrt(variance + 1e-5);
  return x.map((value, i) => (value - mean) / std * gain[i] + bias[i]);
}

export const add = (a, b) => a.map((value, i) => value + b[i]);

export function softmax(logits) {
  const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const exps = Float64Array.from(logits, logit => Math.exp(logit - largest));
  const total = exps.reduce((a, b) => a + b, 0);
  return exps.map(value => value / total);
}

// Log-probabilities in which PAD and BOS have probability 0.
function allowedLogProbs(logits) {
  const allowed = Float64Array.from(logits);
  allowed[PAD] = -Infinity;
  allowed[BOS] = -Infinity;
  const largest = allowed.reduce((a, b) => Math.max(a, b));
  let total = 0;
  for (const logit of allowed) total += Math.exp(logit - largest);
  return allowed.map(logit => logit - largest - Math.log(total));
}

// Nodes from the first token (BOS) to `node`.
export function pathOf(node) {
  const path = [];
  for (let n = node; n; n = n.parent) path.unshift(n);
  return path;
}

// What a visitor can change. `turned` maps 'encoder 1 3 6' (stack, layer, head, query) to a key:
// there, the head attends to that key alone. `off` holds heads, 'encoder 1 3', whose output is 0.
export const noChanges = () =>
  ({turned: new Map(), off: new Set(), positions: true, causalMask: true});

export class Model {
  constructor(config, weights) {
    const shown = {kind: 'transformer', norm: 'post', positions: 'sinusoidal', tied: true};
    for (const [name, value] of Object.entries(shown))
      if (config[name] !== value)
        throw new Error(`this page shows models with ${name}=${value}, not ${config[name]}`);
    this.config = config;
    this.weights = weights;
    this.changes = noChanges();
  }

  project(name, x) {
    return linear(this.weights[`${name}.weight`], this.weights[`${name}.bias`], x);
  }

  // Add & Norm: LayerNorm(x + sublayer(x))
  addNorm(name, x, sublayer) {
    const sum = add(x, sublayer);
    const out = layerNorm(sum, this.weights[`${name}.norm.weight`], this.weights[`${name}.norm.bias`]);
    return {x, sublayer, sum, out};
  }

  embed(id, position) {
    const d = this.config.d_model;
    const row = this.weights['src_embed.weight'].subarray(id * d, (id + 1) * d);
    const token = row.map(value => value * Math.sqrt(d));
    const encoding = new Float32Array(d);
    if (this.changes.positions)
      for (let i = 0; i < d; i++) {
        const angle = position * 10000 ** (-(i - i % 2) / d);
        encoding[i] = i % 2 ? Math.cos(angle) : Math.sin(angle);
      }
    return {token, encoding, sum: add(token, encoding)};
  }

  // Multi-head attention of one query; equation 1 in each head.
  attend(name, site, position, query, keys, values) {
    const {d_model: d, n_heads: nHeads} = this.config;
    const dK = d / nHeads;
    const scores = [];
    const weights = [];
    const heads = new Float32Array(d); // the heads' outputs side by side
    for (let head = 0; head < nHeads; head++) {
      const start = head * dK;
      const headScores = Float64Array.from(keys, key => {
        let sum = 0;
        for (let i = start; i < start + dK; i++) sum += query[i] * key[i];
        return sum / Math.sqrt(dK);
      });
      let headWeights = softmax(headScores);
      const turnedTo = this.changes.turned.get(`${site} ${head} ${position}`);
      if (turnedTo < keys.length) headWeights = headWeights.map((_, j) => j === turnedTo ? 1 : 0);
      if (!this.changes.off.has(`${site} ${head}`))
        values.forEach((value, j) => {
          for (let i = start; i < start + dK; i++) heads[i] += headWeights[j] * value[i];
        });
      scores.push(headScores);
      weights.push(headWeights);
    }
    return {query, keys, values, scores, weights, heads, out: this.project(`${name}.out_proj`, heads)};
  }

  feedForward(name, x) {
    const linear1 = this.project(`${name}.linear1`, x);
    const hidden = linear1.map(value => Math.max(0, value));
    return {x, hidden, out: this.project(`${name}.linear2`, hidden)};
  }

  // ids with EOS; the encoder's layers, each with one record for each token
  encode(ids) {
    const embeddings = ids.map((id, position) => this.embed(id, position));
    let xs = embeddings.map(embedding => embedding.sum);
    const layers = [];
    for (let l = 0; l < this.config.n_layers; l++) {
      const name = `encoder.layers.${l}`;
      const attention = `${name}.self_attention`;
      const queries = xs.map(x => this.project(`${attention}.q_proj`, x));
      const keys = xs.map(x => this.project(`${attention}.k_proj`, x));
      const values = xs.map(x => this.project(`${attention}.v_proj`, x));
      const rows = xs.map((x, position) => {
        const self = this.attend(attention, `encoder ${l}`, position, queries[position], keys, values);
        const norm1 = this.addNorm(`${name}.residual1`, x, self.out);
        const feedForward = this.feedForward(`${name}.feed_forward`, norm1.out);
        const norm2 = this.addNorm(`${name}.residual2`, norm1.out, feedForward.out);
        return {x, self, norm1, feedForward, norm2};
      });
      layers.push(rows);
      xs = rows.map(row => row.norm2.out);
    }
    const cross = layers.map((_, l) => { // keys and values for each decoder layer
      const name = `decoder.layers.${l}.cross_attention`;
      return {keys: xs.map(x => this.project(`${name}.k_proj`, x)),
              values: xs.map(x => this.project(`${name}.v_proj`, x))};
    });
    return {ids, embeddings, layers, out: xs, cross};
  }

  // One node for each new token. A node knows its parent, so that hypotheses form a tree.
  // The keys and values of its ancestors are reused. Without the causal mask, a query sees all tokens.
  decode(source, parent, ids) {
    const past = pathOf(parent);
    const nodes = [];
    for (const id of ids) {
      const position = past.length + nodes.length;
      const embedding = this.embed(id, position);
      nodes.push({id, position, embedding, layers: [], parent: nodes.at(-1) ?? parent});
    }
    let xs = nodes.map(node => node.embedding.sum);
    for (let l = 0; l < this.config.n_layers; l++) {
      const name = `decoder.layers.${l}`;
      const attention = `${name}.self_attention`;
      const keys = past.map(node => node.layers[l].key);
      const values = past.map(node => node.layers[l].value);
      for (const x of xs) {
        keys.push(this.project(`${attention}.k_proj`, x));
        values.push(this.project(`${attention}.v_proj`, x));
      }
      xs = nodes.map((node, i) => {
        const x = xs[i];
        const seen = this.changes.causalMask ? node.position + 1 : keys.length;
        const self = this.attend(attention, `decoder ${l}`, node.position,
          this.project(`${attention}.q_proj`, x), keys.slice(0, seen), values.slice(0, seen));
        const norm1 = this.addNorm(`${name}.residual1`, x, self.out);
        const cross = this.attend(`${name}.cross_attention`, `cross ${l}`, node.position,
          this.project(`${name}.cross_attention.q_proj`, norm1.out),
          source.cross[l].keys, source.cross[l].values);
        const norm2 = this.addNorm(`${name}.residual2`, norm1.out, cross.out);
        const feedForward = this.feedForward(`${name}.feed_forward`, norm2.out);
        const norm3 = this.addNorm(`${name}.residual3`, norm2.out, feedForward.out);
        const [key, value] = [keys[node.position], values[node.position]];
        node.layers.push({x, key, value, self, norm1, cross, norm2, feedForward, norm3});
        return norm3.out;
      });
    }
    nodes.forEach((node, i) => {
      node.out = xs[i];
      node.logits = linear(this.weights['src_embed.weight'], null, xs[i]); // tied weights
      node.logProbs = allowedLogProbs(node.logits);
    });
    return nodes;
  }
}
