// Activation records: what the target's states are to the drafter's cross-attention. As moa/records.py, `RecordBuffer` of
// moa/graph/cache.py, edge_client/link/record_flow.py and edge_client/turn/records.py. Tokens are exact whatever happens here.

import { Smoothed } from "./estimates.js";
import { message } from "./messages.js";
import { Ranges } from "./ranges.js";
import { ProtocolError, same } from "./text.js";
import { MASKED } from "./tree.js";

/** @typedef {import("./messages.js").Message} Message */
/** @typedef {{count: number, width: number}} Heads */

const INT4_GROUP = 32;
const group = (/** @type {string} */ dtype, /** @type {number} */ width) => (dtype === "int4" && width % INT4_GROUP === 0 ? INT4_GROUP : width);

/** Payload bytes of one position's record. @param {string} dtype @param {number} heads @param {number} width */
export function rowBytes(dtype, heads, width) {
  const numbers = heads * width;
  if (dtype === "fp16") return 4 * numbers;
  const scales = 2 * heads * (width / group(dtype, width));
  return 2 * ((dtype === "int4" ? numbers / 2 : numbers) + scales);
}

/** A number of 16 bits; a `ProtocolError` if it is none: attention would carry that from one row into all others.
 * @param {number} bits */
function half(bits) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) throw new ProtocolError("activation records contain NaN or Inf");
  const size = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
  return bits & 0x8000 ? -size : size;
}

/** Keys and values `[rows, heads, width]` of a payload. @param {Uint8Array} payload @param {string} dtype @param {number} rows
 * @param {number} heads @param {number} width */
export function decodeRecords(payload, dtype, rows, heads, width) {
  if (!["int8", "int4", "fp16"].includes(dtype)) throw new ProtocolError(`unknown record precision '${dtype}'`);
  if (payload.length !== rows * rowBytes(dtype, heads, width)) {
    throw new ProtocolError(`${payload.length} bytes for ${rows} ${dtype} records of ${heads} x ${width}`);
  }
  const numbers = 2 * rows * heads * width;
  const both = new Float32Array(numbers);
  const view = new DataView(payload.buffer, payload.byteOffset, payload.byteLength);
  if (dtype === "fp16") for (let i = 0; i < numbers; i++) both[i] = half(view.getUint16(2 * i, true));
  else {
    const size = group(dtype, width), plane = dtype === "int4" ? numbers / 2 : numbers;
    for (let start = 0, at = plane; start < numbers; start += size, at += 2) {
      const scale = half(view.getUint16(at, true));
      for (let i = start; i < start + size; i++) {
        const level = dtype === "int8" ? view.getInt8(i) : ((payload[i >> 1] >> (i & 1 ? 4 : 0)) & 15) - 8;
        both[i] = level * scale;
      }
    }
  }
  return { keys: both.subarray(0, numbers / 2), values: both.subarray(numbers / 2) };
}

/** Keys and values `[1, heads, size, width]` of some layers, by row; they grow by doubling. */
class Rows {
  /** @param {Heads[]} layers @param {number} size */
  constructor(layers, size) {
    this.layers = layers;
    this.size = size;
    this.arrays = layers.flatMap((of) => [0, 1].map(() => new Float32Array(of.count * size * of.width)));
  }

  /** Grow to at least this many rows. @param {number} rows */
  reserve(rows) {
    if (rows <= this.size) return;
    let { size } = this;
    while (size < rows) size *= 2;
    const grown = new Rows(this.layers, size);
    grown.arrays.forEach((array, i) => {
      const { count, width } = this.layers[i >> 1];
      for (let head = 0; head < count; head++) {
        array.set(this.arrays[i].subarray(head * this.size * width, (head + 1) * this.size * width), head * size * width);
      }
    });
    this.size = size;
    this.arrays = grown.arrays;
  }

  /** Put one row into an array, from numbers that lie `[heads, width]`.
   * @param {number} array @param {number} row @param {Float32Array} numbers */
  put(array, row, numbers) {
    const { count, width } = this.layers[array >> 1];
    for (let head = 0; head < count; head++) {
      this.arrays[array].set(numbers.subarray(head * width, (head + 1) * width), (head * this.size + row) * width);
    }
  }
}

const FIRST = 256;

/** Records by position. Missing ones are masked, so any subset works. Records may include rows of layers with a cache,
 * which replace the drafter's own for the same tokens (`lend`). */
export class RecordBuffer {
  /** @param {Heads} heads of cross-attention @param {Heads[]} borrowed of each borrowed layer */
  constructor(heads, borrowed = []) {
    this.heads = heads;
    this.borrowed = borrowed;
    const parts = [heads, ...borrowed];
    const divisor = (/** @type {number} */ a, /** @type {number} */ b) => {
      while (b) [a, b] = [b, a % b];
      return a;
    };
    const width = parts.map((of) => of.width).reduce(divisor);
    /** Heads of a record on the wire. @type {Heads} */
    this.wire = { count: parts.reduce((sum, of) => sum + of.count * of.width, 0) / width, width };
    this.held = new Ranges();
    this.rows = new Rows([heads], FIRST);
    this.theirs = new Rows(borrowed, FIRST);
    this.mask = new Float32Array(FIRST).fill(MASKED);
    /** Ranges in which the drafter's cache still has its own rows in the borrowed layers. @type {number[][]} */
    this.due = [];
  }

  /** Rows of the arrays of `feeds`. */
  get size() {
    return this.rows.size;
  }

  /** The graph's record inputs, if it has any: the same arrays, changed in place until they must grow.
   * @returns {Record<string, Float32Array>} */
  feeds() {
    const [record_k, record_v] = this.rows.arrays;
    return this.heads.count ? { record_k, record_v, record_mask: this.mask } : {};
  }

  /** Store records `[rows, heads, width]`, as on the wire, of positions from `start` on.
   * @param {number} start @param {Float32Array} keys @param {Float32Array} values */
  put(start, keys, values) {
    const size = this.wire.count * this.wire.width, stop = start + keys.length / size;
    this.rows.reserve(stop);
    this.theirs.reserve(stop);
    if (this.rows.size > this.mask.length) {
      const before = this.mask;
      this.mask = new Float32Array(this.rows.size).fill(MASKED);
      this.mask.set(before);
    }
    for (let row = start; row < stop; row++) {
      [keys, values].forEach((numbers, part) => {
        let at = (row - start) * size;
        [this.heads, ...this.borrowed].forEach(({ count, width }, layer) => {
          const piece = numbers.subarray(at, (at += count * width));
          if (layer) this.theirs.put(2 * (layer - 1) + part, row, piece);
          else this.rows.put(part, row, piece);
        });
      });
    }
    this.mask.fill(0, start, stop);
    this.held.add(start, stop);
    this.made(start, stop);
  }

  /** Note that the drafter has computed its own rows at these positions. @param {number} start @param {number} stop */
  made(start, stop) {
    if (this.borrowed.length) this.due.push([start, stop]);
  }

  /** Replace the drafter's rows by the target's, in the last layers of a cache `[1, heads, rows, width]` with `length`
   * committed rows. @param {Float32Array[]} arrays @param {number} length */
  lend(arrays, length) {
    const waiting = [];
    const mine = arrays.slice(arrays.length - 2 * this.borrowed.length);
    for (const [start, stop] of this.due) {
      for (const [from, to] of this.held) {
        const first = Math.max(from, start), last = Math.min(to, stop, length);
        if (first >= last) continue;
        mine.forEach((array, i) => {
          const { count, width } = this.borrowed[i >> 1], rows = array.length / count / width;
          for (let head = 0; head < count; head++) {
            const at = head * this.theirs.size;
            array.set(this.theirs.arrays[i].subarray((at + first) * width, (at + last) * width), (head * rows + first) * width);
          }
        });
      }
      if (stop > length) waiting.push([Math.max(start, length), stop]);
    }
    this.due = waiting;
  }

  /** Forget the records of positions from `length` on. @param {number} length */
  truncate(length) {
    this.mask.fill(MASKED, length);
    this.held.truncate(length);
  }
}

/** Flow control of the records of one connection: the verifier paces them by the acknowledgements. */
export class RecordFlow {
  /** Bytes a second at which records arrive, where two runs follow each other closely. */
  bandwidth = new Smoothed();
  received = 0;
  acknowledged = 0;
  last = 0;

  /** Counting starts again on every connection. */
  connected() {
    this.received = this.acknowledged = 0;
  }

  /** @param {number} size @param {number} now */
  arrived(size, now) {
    if (this.last && size && now > this.last && now - this.last < 0.5) this.bandwidth.add(size / (now - this.last));
    this.last = now;
  }

  /** Records are stored or dropped: the verifier may send more. @param {number} size */
  taken(size) {
    this.received += size;
  }

  acknowledge() {
    if (this.received === this.acknowledged) return null;
    this.acknowledged = this.received;
    return message("ack", { received: this.received });
  }
}

const TOO_SLOW = 1.5, FAST_ENOUGH = 4, SAMPLES = 8, MOST_EARLY = 64;

/** The records of one conversation: store rows, and choose their precision. */
export class Records {
  /** @param {RecordBuffer | null} buffer @param {RecordFlow} flow */
  constructor(buffer, flow = new RecordFlow()) {
    this.buffer = buffer;
    this.flow = flow;
    /** What the user wants: `auto` or a precision. */
    this.precision = "auto";
    /** Rows received. */
    this.count = 0;
    /** Not stored yet: that is done while no request can be made. @type {Message[]} */
    this.arrived = [];
    /** Of tokens that are not known yet. @type {Message[]} */
    this.early = [];
    this.lowered = false;
    this.judgedAt = 0;
  }

  /** The precision to ask for now. */
  get dtype() {
    if (!this.buffer) return "off";
    if (this.precision !== "auto") return this.precision;
    return this.lowered && this.buffer.wire.width % 2 === 0 ? "int4" : "int8";
  }

  /** The rows received. @returns {number[][]} */
  held() {
    return this.buffer ? [...this.buffer.held] : [];
  }

  /** Whether records of the first `rows` tokens are wanted, and not all of them are here. @param {number} rows */
  misses(rows) {
    return this.buffer !== null && this.dtype !== "off" && !this.buffer.held.full(rows);
  }

  /** Store what has arrived. Records may come before their tokens, if those were lost with a connection: they wait, up to
   * `longest`, the longest log that this turn can have. @param {import("./session.js").ClientSession} session @param {number} longest */
  store(session, longest) {
    for (const { payload } of this.arrived) this.flow.taken(payload.length);
    const waiting = [...this.early, ...this.arrived];
    this.arrived = [];
    this.early = [];
    for (const run of waiting) {
      if (!same(run.session, session.id)) continue; // of an abandoned one
      const stop = run.start + run.rows;
      if (session.log.length < stop && stop <= longest && this.early.length < MOST_EARLY) this.early.push(run);
      else {
        this.keep(run, session.log.length);
        session.receive(run);
      }
    }
  }

  /** @param {Message} run @param {number} length of the log: a record belongs to one of its tokens */
  keep({ start, rows, dtype, heads, head_dim, payload }, length) {
    if (start + rows > length) throw new ProtocolError(`records of tokens ${start}..${start + rows} of ${length}`);
    this.count += rows;
    if (!this.buffer || dtype === "off") return;
    const { count, width } = this.buffer.wire;
    if (heads !== count || head_dim !== width) {
      throw new ProtocolError(`records of ${heads} x ${head_dim}, the drafter's are ${count} x ${width}`);
    }
    const { keys, values } = decodeRecords(payload, dtype, rows, count, width);
    this.buffer.put(start, keys, values);
  }

  /** Drop the records of positions from `length` on: the tokens there have changed. @param {number} length */
  truncate(length) {
    this.buffer?.truncate(length);
  }

  /** Adapt the precision to the bandwidth; returns a message to send, if it changed.
   * @param {import("./session.js").ClientSession} session @param {number} speed tokens a second */
  adjust(session, speed) {
    const { samples, value } = this.flow.bandwidth;
    if (!this.buffer || this.precision !== "auto" || samples - this.judgedAt < SAMPLES) return null;
    const needed = speed * rowBytes("int8", this.buffer.wire.count, this.buffer.wire.width);
    const lowered = value < (this.lowered ? FAST_ENOUGH : TOO_SLOW) * needed;
    if (lowered === this.lowered) return null;
    this.lowered = lowered;
    this.judgedAt = samples;
    session.records = this.dtype;
    return message("sync", { session: session.id, records: this.dtype });
  }
}
