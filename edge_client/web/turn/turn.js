// The text of one answer as its reader has it: what the endpoint says, and what this device wrote
// while the endpoint did not answer. Pure: chunks of the endpoint's stream go in, chunks for the
// page come out, in the same form (docs/serve.md, mode `provisional`). Positions count characters
// (code points).
//
// The endpoint's text is the target's. This device's own text stays behind it for as long as the
// endpoint's is a beginning of it; at the first difference it is cut there. So no text is lost or
// shown twice, and the end is the target's.

/** What this device wrote: after how much of the text, its tokens, and where each of them ends in
 * the text.
 * @typedef {{begin: number, ids: number[], ends: number[]}} Alone */
/** All of it as plain data: a page that was killed goes on with it.
 * @typedef {{text: string, verified: number, stream: string, seen: string, theirs: {text: string,
 * verified: number}, calls: any[], alone: Alone | null, finish: string, end: any, refused: string}}
 * TurnState */

/** @type {TurnState} */
const NEW = {
  text: "",
  verified: 0,
  stream: "",
  seen: "",
  theirs: { text: "", verified: 0 },
  calls: [],
  alone: null,
  finish: "",
  end: null,
  refused: "",
};

/** @param {any} value */
const isObject = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value);

/** @param {any} value */
const isAbsent = (value) => value === undefined || value === null;

/** @param {any} value */
const isTextOrAbsent = (value) => isAbsent(value) || typeof value === "string";

/** @param {any} value */
const isCountOrAbsent = (value) =>
  value === undefined || (Number.isSafeInteger(value) && value >= 0);

/** Whether `take` can read this. @param {any} choice */
function isChoice(choice) {
  if (!isObject(choice)) return false;
  const delta = choice.delta ?? {};
  const marks = choice.moa ?? {};
  if (!isObject(delta) || !isObject(marks)) return false;
  const calls = delta.tool_calls ?? [];
  if (!Array.isArray(calls) || !calls.every(isObject)) return false;
  if (!isTextOrAbsent(delta.content) || !isTextOrAbsent(choice.finish_reason)) return false;
  return isCountOrAbsent(marks.cut) && isCountOrAbsent(marks.verified);
}

/** The chunk of an endpoint's stream as it is, if `take` can read it; else an error.
 * @param {any} chunk */
export function checked(chunk) {
  const choices = chunk?.choices ?? [];
  const isGood =
    isObject(chunk) &&
    (isAbsent(chunk.moa) || isObject(chunk.moa)) &&
    Array.isArray(choices) &&
    (choices.length === 0 || isChoice(choices[0]));
  if (!isGood) throw new TypeError("no chunk of an answer");
  return chunk;
}

export class Turn {
  /** @param {Partial<TurnState>} kept */
  constructor(kept = {}) {
    const state = { ...NEW, ...kept };
    this.shown = [...state.text];
    this.verified = state.verified;
    /** The endpoint's stream, "" if there is none, and its last event that was taken. */
    this.stream = state.stream;
    this.seen = state.seen;
    /** Its text so far, and how much of that will not change. */
    this.theirs = [...state.theirs.text];
    this.sure = state.theirs.verified;
    /** Its calls of tools so far, each complete. @type {any[]} */
    this.calls = [...state.calls];
    /** How many characters both texts are known to have in common. */
    this.agreed = this.#common(0);
    /** @type {Alone | null} */
    this.alone = state.alone && structuredClone(state.alone);
    /** Why this device's own text ended, if it has. */
    this.finish = state.finish;
    /** The chunk that ended the answer, when it has ended. */
    this.end = state.end;
    /** Why the endpoint refuses this answer for good. */
    this.refused = state.refused;
  }

  /** @returns {TurnState} */
  kept() {
    const { text, verified, stream, seen, finish, end, refused } = this;
    const calls = [...this.calls];
    const alone = this.alone && structuredClone(this.alone);
    return {
      text,
      verified,
      stream,
      seen,
      theirs: { text: this.theirs.join(""), verified: this.sure },
      calls,
      alone,
      finish,
      end,
      refused,
    };
  }

  get text() {
    return this.shown.join("");
  }

  /** Whether every character is the target's own. */
  get settled() {
    return this.verified === this.shown.length;
  }

  /** For a reader that begins anew. */
  replay() {
    return this.#choice(this.text, {}, this.calls);
  }

  // ---- the endpoint

  /** Its stream begins, at the first character. @param {string} stream */
  begins(stream) {
    this.stream = stream;
    this.seen = "";
    this.theirs = [];
    this.calls = [];
    this.sure = this.agreed = 0;
  }

  /** It is no longer kept, or broke off. */
  forget() {
    this.begins("");
  }

  /** A chunk of it; returns what the page is told. @param {any} chunk */
  take(chunk) {
    const choice = chunk.choices?.[0];
    if (!choice) return chunk;
    const { delta = {}, moa: marks = {}, finish_reason: finish } = choice;
    const { tool_calls: calls = [] } = delta;
    const settled = Boolean(finish) && (marks.all_verified ?? true);
    this.#hear(delta.content ?? "", marks, settled);
    this.calls.push(...calls);
    const [content, cut] = this.#follow(settled);
    this.verified = Math.max(this.sure, Math.min(this.verified, cut ?? this.verified));
    const told = cut === null ? {} : { cut };
    this.end = null; // more may follow an end, when it is checked
    if (!finish) return this.#choice(content, told, calls);
    const ended = { ...told, reason: marks.reason ?? finish, all_verified: settled };
    const [last] = this.#choice(content, ended, calls).choices;
    this.end = { choices: [{ ...last, finish_reason: finish }] };
    return this.end;
  }

  /** The endpoint's own text, after a chunk; `settled`: all of it is the target's.
   * @param {string} content @param {any} marks @param {boolean} settled */
  #hear(content, { cut, verified }, settled) {
    if (cut !== undefined) {
      this.theirs.length = Math.min(this.theirs.length, cut);
      this.agreed = Math.min(this.agreed, cut);
    }
    this.theirs.push(...content);
    const { length } = this.theirs;
    this.sure = settled ? length : Math.min(length, verified ?? this.sure);
  }

  /** The reader's text becomes the endpoint's where that is longer or another one; `ends`: and
   * where it is shorter.
   * @param {boolean} ends
   * @returns {[string, number | null]} what is new, and how much of the old is kept, null: all */
  #follow(ends) {
    const { theirs } = this;
    this.agreed = this.#common(this.agreed);
    const same = this.agreed;
    if (same === theirs.length && !(ends && this.shown.length > same)) return ["", null];
    const cut = same < this.shown.length ? same : null;
    const more = theirs.slice(same);
    this.shown = [...this.shown.slice(0, same), ...more];
    this.agreed = theirs.length;
    this.alone = null;
    this.finish = "";
    return [more.join(""), cut];
  }

  /** @param {number} from */
  #common(from) {
    const { theirs } = this;
    let at = from;
    while (at < theirs.length && theirs[at] === this.shown[at]) at++;
    return at;
  }

  // ---- this device

  /** Where it goes on writing: the text of others, and its own tokens after that.
   * @returns {{before: string, ids: number[]}} */
  here() {
    this.alone ??= { begin: this.shown.length, ids: [], ends: [] };
    const { begin, ids } = this.alone;
    return { before: this.shown.slice(0, begin).join(""), ids };
  }

  /** Its tokens that no verifier has seen. @returns {number[]} */
  get unseen() {
    const { alone, verified } = this;
    return alone ? alone.ids.filter((_, at) => alone.ends[at] > verified) : [];
  }

  /** It wrote a token after `here()`; `finish`: why the text ends with it, "" if it goes on.
   * @param {number} id @param {string} piece @param {string} finish */
  wrote(id, piece, finish) {
    this.here();
    this.shown.push(...piece);
    const alone = /** @type {Alone} */ (this.alone);
    alone.ids.push(id);
    alone.ends.push(this.shown.length);
    this.finish = finish;
    return this.#choice(piece, {});
  }

  /** The answer ends without the target's word. One that the reader has stopped may be all the
   * target's so far.
   * @param {string} reason
   * @param {any} usage */
  leaves(reason, usage) {
    const settled = reason === "cancelled" && this.settled;
    const [choice] = this.#choice("", { reason, all_verified: settled }).choices;
    this.end = { choices: [{ ...choice, finish_reason: reason }], usage };
    return this.end;
  }

  /** @param {string} content @param {any} marks @param {any[]} calls */
  #choice(content, marks, calls = []) {
    const delta = calls.length ? { content, tool_calls: calls } : { content };
    return { choices: [{ delta, moa: { verified: this.verified, ...marks } }] };
  }
}
