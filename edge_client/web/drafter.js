// The drafter as a graph over onnxruntime-web: a KV cache that follows the given ids, and drafts after them.
// A port of moa/graph/drafter.py and cache.py. The caller passes all ids so far; the cached part is found by comparison.
// Array sizes are Python's too, so that both add up the same numbers in the same order.

import { GuessTreeGrower } from "./turn/guesses.js";
import { gumbel } from "./turn/noise.js";
import { RecordBuffer } from "./turn/records.js";
import { MASKED, TreeGrower } from "./turn/tree.js";

const FORBIDDEN = MASKED / 2;
const FIRST = 256;  // rows of a new buffer
const CHUNK = 128;  // prompt tokens fed in one run: bounds the time between two yields

// Keys and values of each layer as [1, heads, rows, width], which grow by doubling; unused rows are masked, not cleared.
class KVBuffer {
  constructor(layers) {
    this.layers = layers.flatMap((heads) => [heads, heads]);
    this.size = FIRST;
    this.arrays = this.layers.map(({ count, width }) => new Float32Array(count * FIRST * width));
  }

  reserve(rows) {
    const before = this.size;
    while (this.size < rows) this.size *= 2;
    if (this.size === before) return;
    this.arrays = this.arrays.map((old, at) => {
      const { count, width } = this.layers[at];
      const grown = new Float32Array(count * this.size * width);
      for (let head = 0; head < count; head++) grown.set(old.subarray(head * before * width, (head + 1) * before * width), head * this.size * width);
      return grown;
    });
  }

  // Puts `count` rows of every array, [1, heads, count, width], at row `at`, where there is room.
  put(at, rows, count) {
    this.#eachHead((mine, layer, head, width) => {
      mine.set(rows[layer].subarray(head * count * width, (head + 1) * count * width), (head * this.size + at) * width);
    });
  }

  // Copies rows to `to`, `to + 1`, ...
  gather(sources, to) {
    if (sources.every((row, at) => row === to + at)) return;
    this.#eachHead((mine, layer, head, width) => {
      const first = head * this.size;
      const copies = sources.map((row) => mine.slice((first + row) * width, (first + row + 1) * width));
      copies.forEach((row, at) => mine.set(row, (first + to + at) * width));
    });
  }

  #eachHead(act) {
    this.arrays.forEach((mine, layer) => {
      const { count, width } = this.layers[layer];
      for (let head = 0; head < count; head++) act(mine, layer, head, width);
    });
  }
}

export class Drafter {
  // `graph`: { ort, session, cache: [{ count, width }], records: { count, width } | null, borrowed: layers, features: bool, vocabulary: size or ids }.
  constructor(graph) {
    this.graph = graph;
    this.records = graph.records && new RecordBuffer(graph.records, graph.cache.slice(graph.cache.length - graph.borrowed));
    this.ids = [];  // tokens whose rows are committed: row r is position r
    this.runTokens = 1;
    this.runSeconds = 0;
    this.runs = 0;
    this.rows = new KVBuffer(graph.cache);
    this.nodes = new Map();  // "parent's row,token" -> row, of rows after the committed ones; -1 is the last committed row
    this.growth = null;  // the tree that `grow` extends, whose root follows the committed rows
    this.grownRows = new Map();  // its nodes' rows
    this.noise = new Map();
    this.parts = graph.cache.flatMap((_, layer) => [`k_${layer}`, `v_${layer}`]);
  }

  // The likeliest token after `ids`.
  async *guess(ids, sampling) {
    const found = yield* this.#follow(ids, sampling);
    return found.tokens[0][0];
  }

  // A tree of guesses after `ids`, whose last is its root.
  async *draft(ids, shape, sampling) {
    let found = yield* this.#follow(ids, sampling);
    const grower = new TreeGrower(ids.at(-1), shape);
    const first = this.ids.length;
    const rows = new Map([[0, first]]);
    for (;;) {
      grower.expand(found.tokens, found.logp);
      const nodes = grower.frontier;
      if (!nodes.length) return grower.tree();
      yield;
      const at = first + grower.fed.length;
      nodes.forEach((node, place) => {
        this.nodes.set(`${rows.get(grower.parents[node])},${grower.tokens[node]}`, at + place);
        rows.set(node, at + place);
      });
      found = await this.#level(nodes, grower, rows, at, nodes.map(() => first + grower.level), sampling);
    }
  }

  // Adds to the tree of guesses after `ids`; it is kept, and what is below the new end of `ids` stays.
  async *grow(ids, breadth, least, sampling) {
    let growth = this.#grownAfter(ids);
    if (!growth) {
      const found = yield* this.#follow(ids, sampling);
      growth = this.growth = new GuessTreeGrower(ids.at(-1));
      this.grownRows = new Map([[0, this.ids.length]]);
      this.#expand(growth, [0], found, breadth, least);
      return growth;
    }
    const nodes = growth.best(breadth);
    if (!nodes.length) return growth;
    const rows = this.grownRows, { tokens, parents } = growth.tree;
    const first = Math.max(this.ids.length - 1, ...rows.values()) + 1;
    nodes.forEach((node, at) => {
      rows.set(node, first + at);
      this.nodes.set(`${node ? rows.get(parents[node]) : -1},${tokens[node]}`, first + at);
    });
    const positions = nodes.map((node) => this.ids.length + growth.depths[node]);
    const found = await this.#level(nodes, growth.tree, rows, first, positions, sampling);
    this.#expand(growth, nodes, found, breadth, least);
    return growth;
  }

  #expand(growth, nodes, found, breadth, least) {
    const kept = nodes.map((node, at) => {
      const scores = found.logp[at].slice(0, breadth).map((score) => (Number.isFinite(score) ? score : MASKED));
      const likely = scores.filter((score) => growth.tree.scores[node] + score >= least).length;
      const count = Math.min(Math.max(1, likely), scores.filter((score) => score > FORBIDDEN).length);
      return { tokens: found.tokens[at].slice(0, count), scores: scores.slice(0, count) };
    });
    growth.expand(nodes, kept.map(({ tokens }) => tokens), kept.map(({ scores }) => scores));
  }

  // The earlier tree, if `ids` end in it: nodes on the path are committed, others are dropped.
  #grownAfter(ids) {
    const before = this.ids.length, rows = this.grownRows;
    if (!this.growth || ids.length <= before || ids[before] !== this.growth.root || this.ids.some((id, at) => id !== ids[at])) return null;
    const path = this.growth.find(ids.slice(before + 1));
    if (!path) return null;
    const passed = [0, ...path].slice(0, -1);
    if (passed.some((node) => !rows.has(node))) return null;
    if (!path.length) return this.growth;
    const [growth, were] = this.growth.below(path.at(-1));
    this.growth = growth;
    const kept = were.filter((node) => rows.has(node));
    this.rows.gather([...passed, ...kept].map((node) => rows.get(node)), before);
    this.records?.made(before, before + passed.length);
    this.ids = ids.slice(0, -1);
    this.records?.lend(this.rows.arrays, this.ids.length);
    const place = new Map(kept.map((node, at) => [node, this.ids.length + at]));
    this.grownRows = new Map(were.flatMap((old, node) => (place.has(old) ? [[node, place.get(old)]] : [])));
    const { tokens, parents } = growth.tree;
    this.nodes = new Map([...this.grownRows].map(([node, row]) => [`${this.grownRows.get(parents[node]) ?? -1},${tokens[node]}`, row]));
    return growth;
  }

  // Runs the ids that are not cached, piece by piece; returns the guesses after the last, which is not committed.
  async *#follow(ids, sampling) {
    let known = this.#keep(ids.slice(0, -1));
    for (;;) {
      this.records?.lend(this.rows.arrays, this.ids.length);
      let stop = Math.min(known + CHUNK, ids.length);
      if (this.graph.borrowed && known < stop - 1) stop = Math.min(stop, ids.length - 1);  // the last attends to the target's rows
      const piece = ids.slice(known, stop);
      this.rows.reserve(stop);
      const mask = this.#mask(piece.length, known);
      for (let at = 0; at < piece.length; at++) mask.rows[at].fill(0, this.rows.size, this.rows.size + at + 1);
      const positions = piece.map((_, at) => known + at), last = [piece.length - 1];
      let found = await this.#run(piece, positions, last, mask.all, known, sampling, piece.map((_, at) => (at ? -1 : known - 1)));
      if (this.graph.features && piece.length > 1) {  // again, with what each token has made for the next one
        found = await this.#run(piece, positions, last, mask.all, known, sampling, piece.map((_, at) => known + at - 1));
      }
      this.records?.made(known, stop);
      this.ids.push(...piece);
      known = stop;
      if (known === ids.length) {
        this.nodes.set(`-1,${this.ids.pop()}`, this.ids.length);
        return found;
      }
      yield;
    }
  }

  // Runs nodes of a tree, which see the committed rows, their ancestors' and themselves.
  #level(nodes, tree, rows, at, positions, sampling) {
    this.rows.reserve(at + nodes.length);
    const mask = this.#mask(nodes.length, this.ids.length);
    nodes.forEach((node, place) => {
      mask.rows[place][this.rows.size + place] = 0;
      for (let above = tree.parents[node]; above >= 0; above = tree.parents[above]) mask.rows[place][rows.get(above)] = 0;
    });
    const above = nodes.map((node) => (node ? rows.get(tree.parents[node]) : this.ids.length - 1));
    return this.#run(nodes.map((node) => tree.tokens[node]), positions, nodes.map((_, place) => place), mask.all, at, sampling, above);
  }

  // A mask that shows the first rows of the cache only: `all` of it, and its `rows`.
  #mask(tokens, shown) {
    const width = this.rows.size + tokens, all = new Float32Array(tokens * width).fill(MASKED);
    const rows = Array.from({ length: tokens }, (_, at) => all.subarray(at * width, (at + 1) * width).fill(0, 0, shown));
    return { all, rows };
  }

  // Cuts the committed rows to the common prefix with `ids`, and appends the tree's rows that continue it.
  #keep(ids) {
    const differs = this.ids.findIndex((id, at) => id !== ids[at]);
    const same = differs < 0 ? this.ids.length : differs;
    if (differs >= 0) this.nodes.clear();
    const path = [];
    for (let row = -1; same + path.length < ids.length; path.push(row)) {
      row = this.nodes.get(`${row},${ids[same + path.length]}`) ?? -2;
      if (row < 0) break;
    }
    this.growth = null;  // its rows are overwritten
    this.rows.gather(path, same);
    this.records?.made(same, same + path.length);
    this.nodes.clear();
    this.ids = ids.slice(0, same + path.length);
    return this.ids.length;
  }

  // Runs tokens whose rows are stored from row `at` on; returns the guesses after each of the `queries`.
  // `above`: of a drafter of states, where each token's feature lies in the cache.
  async #run(tokens, positions, queries, mask, at, sampling, above) {
    const { ort, session } = this.graph, count = tokens.length;
    const whole = (list, dims) => new ort.Tensor("int64", BigInt64Array.from(list, BigInt), dims);
    const real = (array, dims) => new ort.Tensor("float32", array, dims);
    const heads = (array, { count: heads, width }) => real(array, [1, heads, array.length / heads / width, width]);
    const greedy = sampling.temperature === 0;
    const noise = greedy ? [new Float32Array(1)] : this.#noise(sampling.seed, queries.map((query) => positions[query] + 1));
    const feeds = {
      ids: whole(tokens, [1, count]), positions: whole(positions, [1, count]), queries: whole(queries, [queries.length]),
      mask: real(mask, [1, 1, count, mask.length / count]),
      scale: real(Float32Array.of(greedy ? 1 : 1 / sampling.temperature), [1]),
      noise: real(joined(noise), [1, noise.length, noise[0].length]),
    };
    this.parts.forEach((part, place) => { feeds[`past_${part}`] = heads(this.rows.arrays[place], this.rows.layers[place]); });
    if (this.graph.features) feeds.feature_rows = whole(above, [count]);
    const held = this.records?.feeds() ?? {};
    if (held.record_k) {
      for (const name of ["record_k", "record_v"]) feeds[name] = heads(held[name], this.graph.records);
      feeds.record_mask = real(held.record_mask, [1, 1, 1, held.record_mask.length]);
    }
    const began = performance.now();
    const made = await session.run(feeds);
    this.runSeconds += (performance.now() - began) / 1000;
    this.runs++;
    this.runTokens = count;
    const top = made.top_logp.dims[2], logp = queries.map((_, query) => Array.from(made.top_logp.data.subarray(query * top, (query + 1) * top)));
    const rows = this.parts.map((part) => made[`new_${part}`].data);
    if (logp.some(([best]) => !Number.isFinite(best))) {  // a NaN row breaks all later ones, though masked
      for (const row of rows) row.forEach((value, place) => { if (!Number.isFinite(value)) row[place] = 0; });
    }
    this.rows.put(at, rows, count);
    return { logp, tokens: queries.map((_, query) => Array.from(made.top_tokens.data.subarray(query * top, (query + 1) * top), Number)) };
  }

  // The noise over the draft vocabulary of one position, or of each its own; kept, as a position is drafted several times.
  #noise(seed, positions) {
    return (new Set(positions).size === 1 ? positions.slice(0, 1) : positions).map((position) => {
      const key = `${seed},${position}`;
      if (!this.noise.has(key)) {
        if (this.noise.size > 64) this.noise.clear();
        this.noise.set(key, Float32Array.from(gumbel(seed, position, this.graph.vocabulary)));
      }
      return this.noise.get(key);
    });
  }
}

function joined(arrays) {
  if (arrays.length === 1) return arrays[0];
  const all = new Float32Array(arrays.length * arrays[0].length);
  arrays.forEach((array, at) => all.set(array, at * array.length));
  return all;
}
