// The drafter as a graph over onnxruntime-web: a KV cache that follows the given ids, and the token
// after them. It writes while the endpoint does not answer, so it has no records of the target's
// states, and drafts no trees. A port of moa/graph/drafter.py and cache.py. The caller passes all
// ids so far; the cached part is found by comparison. Array sizes are Python's too, so that both
// add up the same numbers in the same order.

import { FIRST_ROWS, LONGEST_PIECE, MASKED, MORE_ROWS } from "./turn/constants.js";
import { gumbel } from "./turn/noise.js";

// Keys and values of each layer as [1, heads, rows, width], which grow; unused rows are masked, not
// cleared.
class KVBuffer {
  constructor(layers) {
    this.layers = layers.flatMap((heads) => [heads, heads]);
    this.size = FIRST_ROWS;
    this.arrays = this.layers.map(
      ({ count, width }) => new Float32Array(count * FIRST_ROWS * width),
    );
  }

  reserve(rows) {
    const before = this.size;
    if (rows <= before) return;
    const wanted = Math.max(rows, Math.floor(before * (1 + MORE_ROWS)));
    this.size = Math.ceil(wanted / FIRST_ROWS) * FIRST_ROWS;
    this.arrays = this.arrays.map((old, at) => {
      const { count, width } = this.layers[at];
      const grown = new Float32Array(count * this.size * width);
      for (let head = 0; head < count; head++) {
        grown.set(
          old.subarray(head * before * width, (head + 1) * before * width),
          head * this.size * width,
        );
      }
      return grown;
    });
  }

  // Puts `count` rows of every array, [1, heads, count, width], at row `at`, where there is room.
  put(at, rows, count) {
    this.#eachHead((mine, layer, head, width) => {
      mine.set(
        rows[layer].subarray(head * count * width, (head + 1) * count * width),
        (head * this.size + at) * width,
      );
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
  // `graph`: { ort, session, cache: [{ count, width }], records: { count, width } | null, borrowed:
  // layers, features: bool, vocabulary: size or ids }.
  constructor(graph) {
    this.graph = graph;
    this.ids = []; // tokens whose rows are committed: row r is position r
    this.next = null; // the token whose row follows them, of the latest guess
    this.runSeconds = 0;
    this.rows = new KVBuffer(graph.cache);
    this.noise = new Map();
    this.parts = graph.cache.flatMap((_, layer) => [`k_${layer}`, `v_${layer}`]);
    this.without = graph.records?.count ? withoutRecords(graph) : {};
  }

  // The likeliest token after `ids`. Yields between its runs, so that others have their turn.
  async *guess(ids, sampling) {
    const found = yield* this.#follow(ids, sampling);
    return found.tokens[0][0];
  }

  // Runs the ids that are not cached, piece by piece; returns the guesses after the last, which is
  // not committed.
  async *#follow(ids, sampling) {
    let known = this.#keep(ids.slice(0, -1));
    for (;;) {
      let stop = Math.min(known + LONGEST_PIECE, ids.length);
      // The last attends to the target's rows.
      if (this.graph.borrowed && known < stop - 1) stop = Math.min(stop, ids.length - 1);
      const piece = ids.slice(known, stop);
      this.rows.reserve(stop);
      const mask = this.#mask(piece.length, known);
      for (let at = 0; at < piece.length; at++) {
        mask.rows[at].fill(0, this.rows.size, this.rows.size + at + 1);
      }
      const positions = piece.map((_, at) => known + at);
      const last = [piece.length - 1];
      let found = await this.#run(
        piece,
        positions,
        last,
        mask.all,
        known,
        sampling,
        piece.map((_, at) => (at ? -1 : known - 1)),
      );
      if (this.graph.features && piece.length > 1) {
        // again, with what each token has made for the next one
        found = await this.#run(
          piece,
          positions,
          last,
          mask.all,
          known,
          sampling,
          piece.map((_, at) => known + at - 1),
        );
      }
      this.ids.push(...piece);
      known = stop;
      if (known === ids.length) {
        this.next = this.ids.pop();
        return found;
      }
      yield;
    }
  }

  // A mask that shows the first rows of the cache only: `all` of it, and its `rows`.
  #mask(tokens, shown) {
    const width = this.rows.size + tokens;
    const all = new Float32Array(tokens * width).fill(MASKED);
    const rows = Array.from({ length: tokens }, (_, at) =>
      all.subarray(at * width, (at + 1) * width).fill(0, 0, shown),
    );
    return { all, rows };
  }

  // Cuts the committed rows to the common prefix with `ids`; returns its length.
  #keep(ids) {
    const differs = this.ids.findIndex((id, at) => id !== ids[at]);
    let same = differs < 0 ? this.ids.length : differs;
    if (differs < 0 && same < ids.length && ids[same] === this.next) same++;
    this.next = null;
    this.ids = ids.slice(0, same);
    return same;
  }

  // Runs tokens whose rows are stored from row `at` on; returns the guesses after each of the
  // `queries`. `above`: of a drafter of states, where each token's feature lies in the cache.
  async #run(tokens, positions, queries, mask, at, sampling, above) {
    const { ort, session } = this.graph;
    const count = tokens.length;
    const whole = (list, dims) => new ort.Tensor("int64", BigInt64Array.from(list, BigInt), dims);
    const real = (array, dims) => new ort.Tensor("float32", array, dims);
    const heads = (array, { count: heads, width }) =>
      real(array, [1, heads, array.length / heads / width, width]);
    const greedy = sampling.temperature === 0;
    const noise = greedy
      ? [new Float32Array(1)]
      : this.#noise(
          sampling.seed,
          queries.map((query) => positions[query] + 1),
        );
    const feeds = {
      ids: whole(tokens, [1, count]),
      positions: whole(positions, [1, count]),
      queries: whole(queries, [queries.length]),
      mask: real(mask, [1, 1, count, mask.length / count]),
      scale: real(Float32Array.of(greedy ? 1 : 1 / sampling.temperature), [1]),
      noise: real(joined(noise), [1, noise.length, noise[0].length]),
    };
    this.parts.forEach((part, place) => {
      feeds[`past_${part}`] = heads(this.rows.arrays[place], this.rows.layers[place]);
    });
    if (this.graph.features) feeds.feature_rows = whole(above, [count]);
    Object.assign(feeds, this.without);
    const began = performance.now();
    const made = await session.run(feeds);
    this.runSeconds += (performance.now() - began) / 1000;
    const top = made.top_logp.dims[2];
    const logp = queries.map((_, query) =>
      Array.from(made.top_logp.data.subarray(query * top, (query + 1) * top)),
    );
    const rows = this.parts.map((part) => made[`new_${part}`].data);
    if (logp.some(([best]) => !Number.isFinite(best))) {
      // a NaN row breaks all later ones, though masked
      for (const row of rows) {
        row.forEach((value, place) => {
          if (!Number.isFinite(value)) row[place] = 0;
        });
      }
    }
    this.rows.put(at, rows, count);
    return {
      logp,
      tokens: queries.map((_, query) =>
        Array.from(made.top_tokens.data.subarray(query * top, (query + 1) * top), Number),
      ),
    };
  }

  // The noise over the draft vocabulary of one position, or of each its own; kept, as a position is
  // drafted several times.
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

// What a graph that may read the target's states is given where there are none: rows that are
// masked, as many as Python's.
function withoutRecords({ ort, records: { count, width } }) {
  const rows = new ort.Tensor("float32", new Float32Array(count * FIRST_ROWS * width), [
    1,
    count,
    FIRST_ROWS,
    width,
  ]);
  const mask = new ort.Tensor("float32", new Float32Array(FIRST_ROWS).fill(MASKED), [
    1,
    1,
    1,
    FIRST_ROWS,
  ]);
  return { record_k: rows, record_v: rows, record_mask: mask };
}

function joined(arrays) {
  if (arrays.length === 1) return arrays[0];
  const all = new Float32Array(arrays.length * arrays[0].length);
  arrays.forEach((array, at) => all.set(array, at * array.length));
  return all;
}
