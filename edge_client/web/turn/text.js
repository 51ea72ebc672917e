// The text of a growing list of tokens, as moa/text_stream.py, and what ends it, as
// moa/wire/finish.py.

/** @typedef {(ids: number[]) => string} Decode */
/** What ends an answer; `start` is the position of its first token.
 * @typedef {{start: number, maxNewTokens: number, maxContext: number, eosIds: Set<number>, stop:
 * string[]}} Rules */

const bytesOf = (/** @type {string} */ text) => new TextEncoder().encode(text).length;

/** Why the answer ends after `token`, "" if it goes on.
 * @param {Rules} rules
 * @param {number[]} ids
 * @param {number} token
 * @param {Decode} decode */
export function finishAfter(rules, ids, token, decode) {
  const length = ids.length + 1;
  if (rules.eosIds.has(token)) return "eos";
  if (rules.stop.length) {
    // Every token except a few special ones adds at least a byte, so this window contains the
    // longest stop string.
    const window = Math.max(...rules.stop.map(bytesOf)) + 16;
    const output = [...ids.slice(Math.max(rules.start, ids.length - window)), token].slice(-window);
    const text = decode(output);
    if (rules.stop.some((stop) => text.includes(stop))) return "stop";
  }
  if (length - rules.start >= rules.maxNewTokens) return "length";
  return length >= rules.maxContext ? "context" : "";
}

/** The text of a growing list of tokens, piece by piece. Held back are incomplete characters, and
 * text that may be the beginning of a stop string. */
export class TextStream {
  /** @param {Decode} decode @param {string[]} stop */
  constructor(decode, stop = []) {
    this.decode = decode;
    this.stop = stop;
    this.raw = "";
    /** @type {number[]} */
    this.ids = [];
    /** Where the context of the next token starts, the tokens that are in the text, and how much of
     * it is shown. */
    this.context = 0;
    this.done = 0;
    this.shown = 0;
    this.stopped = false;
  }

  /** The text that may be shown. */
  get text() {
    return this.raw.slice(0, this.shown);
  }

  /** Add a token; returns the text that it adds. @param {number} token */
  add(token) {
    this.ids.push(token);
    const before = this.decode(this.ids.slice(this.context, this.done));
    const after = this.decode(this.ids.slice(this.context));
    if (after.length <= before.length || after.endsWith("\ufffd")) return "";
    this.raw += after.slice(before.length);
    this.context = this.done;
    this.done = this.ids.length;
    return this.#show();
  }

  /** The text that was held back; call it last. A character of which only the first bytes are there
   * is left out. */
  flush() {
    if (this.stopped) return "";
    const held = this.decode(this.ids.slice(this.context));
    this.raw += held
      .slice(this.decode(this.ids.slice(this.context, this.done)).length)
      .replace(/\ufffd+$/, "");
    const from = this.shown;
    [this.shown] = this.#stopAfter(from);
    return this.raw.slice(from, this.shown);
  }

  #show() {
    const from = this.shown;
    if (this.stopped) return "";
    const [end, stopped] = this.#stopAfter(from);
    this.stopped = stopped;
    this.shown = stopped ? end : this.#withoutBegunStop(end);
    return this.raw.slice(from, this.shown);
  }

  /** Up to the longest end of the text with which some stop string begins. @param {number} end */
  #withoutBegunStop(end) {
    const longest = Math.max(1, ...this.stop.map((stop) => stop.length)) - 1;
    for (let at = Math.max(this.shown, end - longest); at < end; at++) {
      if (this.stop.some((stop) => stop.startsWith(this.raw.slice(at)))) return at;
    }
    return end;
  }

  /** @param {number} start @returns {[number, boolean]} */
  #stopAfter(start) {
    const found = this.stop.map((stop) => this.raw.indexOf(stop, start)).filter((at) => at >= 0);
    return found.length ? [Math.min(...found), true] : [this.raw.length, false];
  }
}
