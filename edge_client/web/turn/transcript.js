// The text of one turn: the verified log, the provisional text after it, and their reconciliation. As
// edge_client/turn/transcript.py, moa/text_stream.py and moa/wire/finish.py.

/** @typedef {(ids: number[]) => string} Decode */
/** What ends a turn; `start` is the position of its first token.
 * @typedef {{start: number, maxNewTokens: number, maxContext: number, eosIds: Set<number>, stop: string[]}} TurnRules */

const bytesOf = (/** @type {string} */ text) => new TextEncoder().encode(text).length;

/** Why the turn ends after `token`, "" if it goes on. @param {TurnRules} rules @param {number[]} log @param {number} token @param {Decode} decode */
export function finishAfter(rules, log, token, decode) {
  const length = log.length + 1;
  if (rules.eosIds.has(token)) return "eos";
  if (rules.stop.length) {
    // Every token except a few special ones adds at least a byte, so this window contains the longest stop string.
    const window = Math.max(...rules.stop.map(bytesOf)) + 16;
    const output = [...log.slice(Math.max(rules.start, log.length - window)), token].slice(-window);
    const text = decode(output);
    if (rules.stop.some((stop) => text.includes(stop))) return "stop";
  }
  if (length - rules.start >= rules.maxNewTokens) return "length";
  return length >= rules.maxContext ? "context" : "";
}

/** The text of a growing list of tokens, piece by piece. Held back are incomplete characters, and text that may be the
 * beginning of a stop string. `characters` are code points, as Python counts them. */
export class TextStream {
  /** @param {Decode} decode @param {string[]} stop */
  constructor(decode, stop = []) {
    this.decode = decode;
    this.stop = stop;
    this.raw = "";
    /** @type {number[]} */
    this.ids = [];
    /** After each token: where its context starts, the tokens that are in the text, the text's length, and how much of
     * it is shown. */
    this.marks = [{ context: 0, done: 0, length: 0, shown: 0, stopped: false }];
  }

  get mark() {
    return this.marks[this.marks.length - 1];
  }

  /** The text that may be shown. */
  get text() {
    return this.raw.slice(0, this.mark.shown);
  }

  /** Add a token; returns the text that it adds. @param {number} token */
  add(token) {
    this.ids.push(token);
    const mark = this.mark;
    const before = this.decode(this.ids.slice(mark.context, mark.done));
    const after = this.decode(this.ids.slice(mark.context));
    if (after.length <= before.length || after.endsWith("\ufffd")) {
      this.marks.push(mark);
      return "";
    }
    this.raw += after.slice(before.length);
    const [shown, stopped] = this.visible(mark);
    this.marks.push({ context: mark.done, done: this.ids.length, length: this.raw.length, shown, stopped });
    return this.raw.slice(mark.shown, shown);
  }

  /** Remove all but the first `tokens`; returns the number of characters that remain. @param {number} tokens */
  cut(tokens) {
    this.ids.length = Math.min(this.ids.length, tokens);
    this.marks.length = Math.min(this.marks.length, tokens + 1);
    this.raw = this.raw.slice(0, this.mark.length);
    return [...this.text].length;
  }

  /** The text that was held back; call it last. A character of which only the first bytes are there is left out. */
  flush() {
    const mark = this.mark;
    if (mark.stopped) return "";
    const held = this.decode(this.ids.slice(mark.context));
    this.raw += held.slice(this.decode(this.ids.slice(mark.context, mark.done)).length).replace(/\ufffd+$/, "");
    const [end] = this.stopAfter(mark.shown);
    this.marks[this.marks.length - 1] = { ...mark, shown: end };
    return this.raw.slice(mark.shown, end);
  }

  /** How much may be shown, and whether a stop string ends it. @param {{shown: number, stopped: boolean}} before
   * @returns {[number, boolean]} */
  visible(before) {
    if (before.stopped) return [before.shown, true];
    const [end, stopped] = this.stopAfter(before.shown);
    if (stopped) return [end, true];
    // The longest end of the text with which some stop string begins.
    const longest = Math.max(1, ...this.stop.map((stop) => stop.length)) - 1;
    for (let at = Math.max(before.shown, end - longest); at < end; at++) {
      if (this.stop.some((stop) => stop.startsWith(this.raw.slice(at)))) return [at, false];
    }
    return [end, false];
  }

  /** @param {number} start @returns {[number, boolean]} */
  stopAfter(start) {
    const found = this.stop.map((stop) => this.raw.indexOf(stop, start)).filter((at) => at >= 0);
    return found.length ? [Math.min(...found), true] : [this.raw.length, false];
  }
}

/** One answer as its reader sees it. Every verified token passes `absorb`: it confirms the first provisional token, or
 * contradicts it. This is the only place of reconciliation, so no token is lost or shown twice. */
export class Transcript {
  /** @param {import("./session.js").ClientSession} session @param {TurnRules} rules @param {Decode} decode
   * @param {() => Uint8Array} newId of sessions */
  constructor(session, rules, decode, newId) {
    this.session = session;
    this.rules = rules;
    this.decode = decode;
    this.newId = newId;
    this.stream = new TextStream(decode, rules.stop);
    /** @type {number[]} */
    this.provisional = [];
    /** Whether each output token is verified. @type {boolean[]} */
    this.sure = [];
    /** Why the provisional text ended, if it has. */
    this.localFinish = "";
    /** The session that was abandoned for another one. @type {import("./session.js").ClientSession | null} */
    this.superseded = null;
    /** @type {any[]} */
    this.events = [];
    /** Position, id and status of tokens without an event yet. @type {[number, number, string][]} */
    this.untold = [];
    /** How much of the session's log has been absorbed. */
    this.known = session.log.length;
  }

  // ---- what there is

  /** Everything so far: verified, then provisional. */
  get ids() {
    return [...this.session.log, ...this.provisional];
  }

  /** How many tokens this turn has. */
  get length() {
    return this.session.log.length + this.provisional.length - this.rules.start;
  }

  /** How many more it may have. */
  get remaining() {
    return this.rules.maxNewTokens - this.length;
  }

  /** Why the turn is over. The end of provisional text is provisional too. */
  get finish() {
    return this.provisional.length ? this.localFinish : this.session.finish || this.localFinish;
  }

  /** Whether every token is the target's own. */
  get verified() {
    return this.sure.every(Boolean);
  }

  /** Whether the turn is over and nothing is left to check. */
  get over() {
    return this.finish !== "" && !this.provisional.length;
  }

  /** Events since the last call. */
  drain() {
    this.write();
    const events = this.events;
    this.events = [];
    return events;
  }

  // ---- what happens

  /** Absorb the new tokens of the session's log. */
  absorb() {
    const { log } = this.session;
    while (this.known < log.length) {
      const token = log[this.known];
      if (this.provisional.length && this.provisional[0] !== token) this.retract();
      const position = this.known++;
      if (this.provisional.length) {
        this.provisional.shift();
        this.sure[position - this.rules.start] = true;
        this.confirmed(position);
      } else this.emit(position, token, true);
    }
    if (this.session.finish && this.provisional.length) this.retract(); // the target ended the turn here
  }

  /** A token written offline. @param {number} token */
  extend(token) {
    this.localFinish = finishAfter(this.rules, this.ids, token, this.decode);
    this.provisional.push(token);
    this.emit(this.session.log.length + this.provisional.length - 1, token, false);
  }

  /** Provisional text as a draft to check: a chain from the pending token on. @param {number} limit */
  bulk(limit) {
    return [this.session.log[this.session.base], ...this.provisional.slice(0, Math.max(0, limit - 1))];
  }

  /** Continue from the verified log in a new session. */
  beginAnew() {
    const old = (this.superseded = this.session);
    this.session = old.successor([...old.log], this.newId());
    this.session.held.truncate(this.known);
    this.known = this.session.log.length;
  }

  /** Be where an interrupted turn was, whose verified tokens are in the log. @param {number[]} provisional @param {string} finish */
  restore(provisional, finish) {
    const { log } = this.session, { start } = this.rules;
    this.session.finish = finish;
    for (const token of log.slice(start)) this.stream.add(token);
    this.sure = log.slice(start).map(() => true);
    for (const token of provisional) this.extend(token);
    this.drain(); // the reader has them
  }

  /** Make events for the tokens without one. */
  write() {
    for (const [position, id, status] of this.untold) {
      this.events.push({ event: "token", position, id, text: this.stream.add(id), status });
    }
    this.untold = [];
  }

  /** @param {number} position @param {number} token @param {boolean} sure */
  emit(position, token, sure) {
    this.sure.push(sure);
    this.untold.push([position, token, sure ? "verified" : "provisional"]);
  }

  /** @param {number} position */
  confirmed(position) {
    this.write();
    const last = this.events[this.events.length - 1];
    if (last?.event === "confirm" && last.stop === position) last.stop++;
    else this.events.push({ event: "confirm", start: position, stop: position + 1 });
  }

  retract() {
    this.write();
    const start = this.known, stop = start + this.provisional.length;
    this.provisional = [];
    this.localFinish = "";
    this.sure.length = start - this.rules.start;
    const characters = this.stream.cut(start - this.rules.start);
    this.events.push({ event: "retract", start, stop, characters });
  }
}
