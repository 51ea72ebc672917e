// Messages and their frames, as moa/wire/messages.py and moa/wire/codec.py have them: one msgpack array a frame.
// A message is an object with its `kind` (the tag) and the fields of Python's class. This end writes what a device
// sends and reads what a verifier sends; whatever is malformed or out of range is a `Refusal`, in both directions.

/** @typedef {{kind: string, [field: string]: any}} Message */

/** A request or a frame is refused; `code` is one of the codes of moa/wire/codes.py. */
export class Refusal extends Error {
  /** @param {string} code @param {string} message @param {string} limit */
  constructor(code, message, limit = "") {
    super(message);
    this.code = code;
    this.limit = limit;
  }
}

// ---- the types of fields

const LIMIT = 2 ** 31;
const SAFE = Number.MAX_SAFE_INTEGER;
/** @param {number} least @param {number} most */
const int = (least, most) => ({ is: "int", least, most });
/** @param {number} least @param {number} most */
const float = (least = -Infinity, most = Infinity) => ({ is: "float", least, most });
/** @param {number} most */
const str = (most = Infinity) => ({ is: "str", most });
/** @param {number} least @param {number} most */
const bytes = (least = 0, most = Infinity) => ({ is: "bytes", least, most });
/** @param {any} item @param {number} least @param {number} most */
const list = (item, most = Infinity, least = 0) => ({ is: "list", item, least, most });
/** @param {string[]} names */
const one = (...names) => ({ is: "one", names });
/** @param {any} of */
const maybe = (of) => ({ is: "maybe", of });
/** @param {Record<string, any>} fields */
const struct = (fields) => ({ is: "struct", fields });
const bool = { is: "bool" };
const nothing = { is: "nothing" };
/** A field that may be missing. @param {any} type @param {any} value */
const or = (type, value) => ({ ...type, value });

const count = int(0, LIMIT - 1);
const session = bytes(16, 16);
const name = str(128);
const token = count;
const ids = list(token, 2 ** 20);
const draft = list(token, 4096, 1);
const parents = int(-1, 4095);
const milliseconds = float(0, 86_400_000);
const records = one("off", "int8", "int4", "fp16");
const finish = one("", "eos", "stop", "length", "context");
const top = int(-1, 20);
const held = list({ is: "pair", item: count }, 4096);
const stop = list(name, 64);

const sampling = struct({
  temperature: float(),
  top_k: count,
  top_p: float(),
  min_p: float(),
  repetition_penalty: float(),
  seed: int(0, SAFE), // Python's go on to 2^63 - 1
});
const greedy = { temperature: 0, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, seed: 0 };
const limits = struct({
  max_frame_bytes: count,
  max_prompt_tokens: count,
  max_context_tokens: count,
  max_new_tokens: count,
  max_tree_nodes: count,
  max_chain_tokens: count,
});
const contract = struct({ heads: count, head_dim: count, dtypes: list(name, 16) });

/** What a device sends. Grammars, penalties and conversations as messages are never sent from here. @type {Record<string, Record<string, any>>} */
export const CLIENT = {
  hello: {
    versions: list(int(-SAFE, SAFE), 16, 1),
    features: list(name, 64),
    client: or(name, ""),
    tokenizer: or(name, ""),
    target: or(name, ""),
    drafter: or(name, ""),
  },
  open: {
    session,
    ids,
    max_new_tokens: or(count, 512),
    sampling: or(sampling, greedy),
    stop: or(stop, []),
    ignore_eos: or(bool, false),
    generated: or(count, 0),
    round: or(count, 0),
    records: or(records, "int8"),
    record_rate: or(count, 0),
    held: or(held, []),
    logprobs: or(top, -1),
    grammar: or(nothing, null),
    penalties: or(nothing, null),
    messages: or(list(nothing, 0), []),
  },
  append: {
    session,
    base: count,
    ids,
    max_new_tokens: or(count, 512),
    stop: or(stop, []),
    ignore_eos: or(bool, false),
    logprobs: or(top, -1),
    grammar: or(nothing, null),
    messages: or(list(nothing, 0), []),
  },
  verify: { session, round: count, base: count, tokens: draft, parents: or(list(parents, 4096), []) },
  stream: { session, round: count, base: count, speculate: or(bool, true), waits: or(bool, false) },
  foresee: {
    session,
    round: count,
    base: count,
    tokens: draft,
    parents: list(parents, 4096, 1),
    neg_log_probs: list(int(0, 255), 4096, 1),
    waits: or(maybe(bool), null),
  },
  cancel: { session, round: count },
  resume: {
    session,
    length: count,
    chain: bytes(16, 16),
    round: count,
    epoch: or(count, 0),
    records: or(records, "int8"),
    record_rate: or(count, 0),
    held: or(held, []),
  },
  sync: { session, records: or(records, "int8"), record_rate: or(count, 0), held: or(maybe(held), null) },
  ack: { received: int(0, SAFE) },
  close: { session },
};

/** What a verifier sends. @type {Record<string, Record<string, any>>} */
export const SERVER = {
  welcome: {
    version: int(-SAFE, SAFE),
    features: list(str()),
    server: str(),
    instance: str(),
    tokenizer: str(),
    target: str(),
    drafter: str(),
    vocab_size: count,
    eos_ids: list(token),
    limits,
    records: or(maybe(contract), null),
    notices: or(list(str()), []),
    computes: or(str(), ""),
  },
  opened: { session, length: count, epoch: or(count, 0) },
  verdict: {
    session,
    round: count,
    base: count,
    path: list(count),
    next_token: token,
    finish: or(finish, ""),
    queue_ms: or(milliseconds, 0),
    forward_ms: or(milliseconds, 0),
    batch: or(count, 1),
    logprobs: or(bytes(), null),
  },
  stream_tokens: {
    session,
    round: count,
    base: count,
    tokens: ids,
    done: or(bool, false),
    finish: or(finish, ""),
    drafted: or(count, 0),
    queue_ms: or(milliseconds, 0),
    forward_ms: or(milliseconds, 0),
    logprobs: or(bytes(), null),
    foreseen: or(count, 0),
  },
  progress: { session, round: count, done: count, total: count },
  activations: {
    session,
    epoch: count,
    start: count,
    rows: count,
    dtype: records,
    heads: count,
    head_dim: count,
    payload: bytes(),
  },
  resumed: {
    session,
    outcome: one("resumed", "reprefilled", "gone"),
    length: or(count, 0),
    round: or(count, 0),
    tail: or(ids, []),
    finish: or(finish, ""),
    running: or(count, 0),
    epoch: or(count, 0),
    logprobs: or(bytes(), null),
  },
  error: {
    code: str(),
    message: str(),
    session: or(bytes(), null),
    round: or(count, 0),
    retry_after_ms: or(count, 0),
    limit: or(str(), ""),
  },
  goaway: { reason: str(), drain_ms: or(count, 0), retry_after_ms: or(count, 0) },
};

export const VERSION = 2;
export const SUBPROTOCOL = "moa.v2";
/** What this end can do: all of Python's but log-probabilities, grammars, penalties and upstreams. */
export const FEATURES = ["append", "foresee", "progress", "records", "resume", "stream", "tree"];
/** Codes after which the same request may succeed later. */
export const RETRYABLE = new Set(["busy", "deadline", "draining", "internal"]);

/** A message of a device, its missing fields filled in. @param {string} kind @param {Record<string, any>} fields */
export function message(kind, fields) {
  /** @type {Message} */
  const made = { kind };
  for (const [field, type] of Object.entries(CLIENT[kind])) made[field] = fields[field] ?? type.value;
  return made;
}

// ---- writing

const utf8 = new TextEncoder();

class Writer {
  constructor() {
    this.at = 0;
    this.view = new DataView(new ArrayBuffer(256));
  }

  /** The place of so many bytes more. @param {number} size */
  room(size) {
    const at = this.at;
    this.at += size;
    if (this.at > this.view.byteLength) {
      const grown = new Uint8Array(Math.max(2 * this.view.byteLength, this.at));
      grown.set(new Uint8Array(this.view.buffer));
      this.view = new DataView(grown.buffer);
    }
    return at;
  }

  /** A byte, and a number of 0, 1, 2, 4 or 8 bytes after it. @param {number} byte @param {number} size @param {number} value */
  head(byte, size = 0, value = 0) {
    const at = this.room(1 + size);
    this.view.setUint8(at, byte);
    if (size === 1) this.view.setUint8(at + 1, value);
    if (size === 2) this.view.setUint16(at + 1, value);
    if (size === 4) this.view.setUint32(at + 1, value);
    if (size === 8) {
      this.view.setUint32(at + 1, Math.floor(value / 2 ** 32));
      this.view.setUint32(at + 5, value >>> 0);
    }
  }

  /** @param {Uint8Array} data */
  raw(data) {
    const at = this.room(data.length);
    new Uint8Array(this.view.buffer).set(data, at);
  }

  /** The header of a string, of bytes or of an array. @param {number} length @param {number} first @param {number} fixed @param {number} most */
  length(length, first, fixed, most) {
    if (length < most) this.head(fixed + length);
    else if (length < 2 ** 8 && first !== 0xdc) this.head(first, 1, length);
    else if (length < 2 ** 16) this.head(first === 0xdc ? first : first + 1, 2, length);
    else this.head(first === 0xdc ? 0xdd : first + 2, 4, length);
  }

  /** @param {number} value */
  int(value) {
    if (value >= 0) {
      if (value < 2 ** 7) this.head(value);
      else if (value < 2 ** 8) this.head(0xcc, 1, value);
      else if (value < 2 ** 16) this.head(0xcd, 2, value);
      else if (value < 2 ** 32) this.head(0xce, 4, value);
      else this.head(0xcf, 8, value);
    } else if (value >= -(2 ** 5)) this.head(value & 0xff);
    else if (value >= -(2 ** 7)) this.head(0xd0, 1, value);
    else if (value >= -(2 ** 15)) this.head(0xd1, 2, value);
    else if (value >= -(2 ** 31)) this.head(0xd2, 4, value);
    else this.head(0xd3, 8, value);
  }

  /** @param {any} type @param {any} value @param {string} where @returns {void} */
  write(type, value, where) {
    switch (type.is) {
      case "nothing":
        sendable(value === null, where);
        return this.head(0xc0);
      case "maybe":
        return value === null ? this.head(0xc0) : this.write(type.of, value, where);
      case "bool":
        sendable(typeof value === "boolean", where);
        return this.head(value ? 0xc3 : 0xc2);
      case "int":
        sendable(Number.isSafeInteger(value) && value >= type.least && value <= type.most, where);
        return this.int(value);
      case "float": {
        sendable(typeof value === "number" && !(value < type.least || value > type.most), where);
        const at = this.room(9);
        this.view.setUint8(at, 0xcb);
        return this.view.setFloat64(at + 1, value);
      }
      case "one":
        sendable(type.names.includes(value), where);
        return this.text(value);
      case "str":
        sendable(typeof value === "string" && !/\p{Surrogate}/u.test(value) && [...value].length <= type.most, where);
        return this.text(value);
      case "bytes":
        sendable(value instanceof Uint8Array && value.length >= type.least && value.length <= type.most, where);
        this.length(value.length, 0xc4, 0, 0);
        return this.raw(value);
      case "pair":
        sendable(Array.isArray(value) && value.length === 2, where);
        this.head(0x92);
        for (const item of value) this.write(type.item, item, where);
        return;
      case "list":
        sendable(Array.isArray(value) && value.length >= type.least && value.length <= type.most, where);
        this.length(value.length, 0xdc, 0x90, 16);
        for (const item of value) this.write(type.item, item, where);
        return;
      default: {
        sendable(value !== null && typeof value === "object" && !Array.isArray(value), where);
        const fields = Object.entries(type.fields);
        this.length(fields.length, 0xdc, 0x90, 16);
        for (const [field, of] of fields) this.write(of, value[field], `${where}.${field}`);
      }
    }
  }

  /** @param {string} text */
  text(text) {
    const data = utf8.encode(text);
    this.length(data.length, 0xd9, 0xa0, 32);
    this.raw(data);
  }
}

/** @param {boolean} good @param {string} where */
function sendable(good, where) {
  if (!good) throw new Refusal("bad_message", `this cannot be sent: ${where}`);
}

/** The frame of a message that a verifier with a frame limit of `most` bytes will read; else a `Refusal`.
 * @param {Message} message @param {number} most */
export function clientFrame(message, most = Infinity) {
  const fields = Object.entries(CLIENT[message.kind]);
  const writer = new Writer();
  writer.length(fields.length + 1, 0xdc, 0x90, 16);
  writer.text(message.kind);
  for (const [field, type] of fields) writer.write(type, message[field], `${message.kind}.${field}`);
  if (writer.at > most) {
    throw new Refusal("limit", `${writer.at} bytes in a frame, at most ${most}`, "max_frame_bytes");
  }
  return new Uint8Array(writer.view.buffer.slice(0, writer.at));
}

// ---- reading

const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const DEEPEST = 256;

class Reader {
  /** @param {Uint8Array} frame */
  constructor(frame) {
    this.frame = frame;
    this.view = new DataView(frame.buffer, frame.byteOffset, frame.byteLength);
    this.at = 0;
  }

  /** The place of the next so many bytes. @param {number} size */
  take(size) {
    const at = this.at;
    if (size > this.frame.length - at) throw bad("it is cut off");
    this.at += size;
    return at;
  }

  /** An unsigned number of so many bytes. @param {number} size */
  unsigned(size) {
    const at = this.take(size);
    if (size === 1) return this.view.getUint8(at);
    if (size === 2) return this.view.getUint16(at);
    if (size === 4) return this.view.getUint32(at);
    return this.view.getUint32(at) * 2 ** 32 + this.view.getUint32(at + 4);
  }

  /** An integer if the next value is one, else undefined. */
  int() {
    const byte = this.frame[this.at];
    if (byte < 0x80) return this.unsigned(1);
    if (byte >= 0xe0) return this.unsigned(1) - 256;
    if (!(byte >= 0xcc && byte <= 0xd3)) return undefined;
    this.take(1);
    if (byte <= 0xcf) return this.unsigned(1 << (byte - 0xcc));
    if (byte === 0xd0) return this.view.getInt8(this.take(1));
    if (byte === 0xd1) return this.view.getInt16(this.take(2));
    if (byte === 0xd2) return this.view.getInt32(this.take(4));
    const at = this.take(8);
    return this.view.getInt32(at) * 2 ** 32 + this.view.getUint32(at + 4);
  }

  /** The length of a string, of bytes or of an array, if the next value is one.
   * @param {number} first @param {number} fixed @param {number} most */
  length(first, fixed, most) {
    const byte = this.frame[this.at];
    if (byte >= fixed && byte < fixed + most) return this.unsigned(1) - fixed;
    const size = (first < 0xdc ? [1, 2, 4] : [2, 4])[byte - first];
    if (size === undefined) return undefined;
    this.take(1);
    return this.unsigned(size);
  }

  array() {
    return this.length(0xdc, 0x90, 16);
  }

  text() {
    const size = this.length(0xd9, 0xa0, 32);
    if (size === undefined) return undefined;
    const at = this.take(size);
    try {
      return decoder.decode(this.frame.subarray(at, at + size));
    } catch {
      throw bad("a text is not UTF-8");
    }
  }

  /** @param {any} type @param {string} where @returns {any} */
  read(type, where) {
    const byte = this.frame[this.at];
    switch (type.is) {
      case "maybe":
        if (byte !== 0xc0) return this.read(type.of, where);
        this.take(1);
        return null;
      case "bool":
        expect(byte === 0xc2 || byte === 0xc3, where);
        return this.unsigned(1) === 0xc3;
      case "int": {
        const value = this.int();
        expect(value !== undefined && value >= type.least && value <= type.most, where);
        return value;
      }
      case "float": {
        const value = byte === 0xca || byte === 0xcb ? this.float() : this.int();
        expect(value !== undefined && value >= type.least && value <= type.most, where);
        return value;
      }
      case "one":
      case "str": {
        const value = this.text();
        expect(value !== undefined && (type.is === "str" || type.names.includes(value)), where);
        expect(type.is === "one" || type.most === Infinity || [...(value ?? "")].length <= type.most, where);
        return value;
      }
      case "bytes": {
        const size = this.length(0xc4, 0, 0);
        expect(size !== undefined && size >= type.least && size <= type.most, where);
        const at = this.take(/** @type {number} */ (size));
        return this.frame.slice(at, this.at);
      }
      case "list": {
        const size = /** @type {number} */ (this.array());
        expect(size !== undefined && size >= type.least && size <= type.most, where);
        if (size > this.frame.length - this.at) throw bad("it is cut off");
        return Array.from({ length: size }, () => this.read(type.item, where));
      }
      default: {
        const size = this.array();
        expect(size !== undefined, where);
        return this.fields(type.fields, /** @type {number} */ (size), where);
      }
    }
  }

  /** The fields of a structure of so many values; missing ones have their default, unknown ones are skipped.
   * @param {Record<string, any>} types @param {number} size @param {string} where */
  fields(types, size, where) {
    /** @type {Record<string, any>} */
    const read = {};
    for (const [field, type] of Object.entries(types)) {
      if (size-- > 0) read[field] = this.read(type, `${where}.${field}`);
      else {
        expect("value" in type, `${where}.${field}`);
        read[field] = Array.isArray(type.value) ? [] : type.is === "bytes" ? new Uint8Array() : type.value;
      }
    }
    while (size-- > 0) this.skip(0);
    return read;
  }

  float() {
    return this.unsigned(1) === 0xca ? this.view.getFloat32(this.take(4)) : this.view.getFloat64(this.take(8));
  }

  /** Any value. @param {number} depth */
  skip(depth) {
    if (depth > DEEPEST) throw bad("it is nested too deep");
    const byte = this.frame[this.at];
    if (byte === 0xc0 || byte === 0xc2 || byte === 0xc3) this.take(1);
    else if (byte === 0xca || byte === 0xcb) this.float();
    else if (this.int() !== undefined) return;
    else {
      const blob = this.length(0xc4, 0, 0) ?? this.length(0xd9, 0xa0, 32);
      if (blob !== undefined) return void this.take(blob);
      if (byte >= 0xd4 && byte <= 0xd8) return void this.take(2 + (1 << (byte - 0xd4)));
      const extension = this.length(0xc7, 0, 0);
      if (extension !== undefined) return void this.take(1 + extension);
      const map = this.length(0xde, 0x80, 16);
      const items = map === undefined ? this.array() : 2 * map;
      if (items === undefined) throw bad("it has a value of no type");
      if (items > this.frame.length - this.at) throw bad("it is cut off");
      for (let i = 0; i < items; i++) this.skip(depth + 1);
    }
  }
}

/** @param {string} why */
function bad(why) {
  return new Refusal("bad_message", `not a message of this protocol: ${why}`);
}

/** @param {boolean} good @param {string} where */
function expect(good, where) {
  if (!good) throw bad(where);
}

/** Read what a verifier sent. @param {Uint8Array} frame @returns {Message} */
export function decodeServer(frame) {
  const reader = new Reader(frame);
  const size = reader.array();
  const kind = size ? reader.text() : undefined;
  if (kind === undefined || !Object.hasOwn(SERVER, kind)) throw bad("it has no known tag");
  const fields = reader.fields(SERVER[kind], /** @type {number} */ (size) - 1, kind);
  if (reader.at !== frame.length) throw bad("something follows it");
  return { kind, ...fields };
}
