// Limits of offline text, as edge_client/turn/guard.py: calibrated for this drafter, and none where
// text repeats itself.

import {
  FIRST_TOKENS,
  LONGEST_NUMBER,
  PHRASE,
  REPEATED_PHRASES,
  REPEATED_PHRASES_LONG,
  REPEATED_TOKENS,
  REPEATED_WITHIN,
  REPEATED_WITHIN_LONG,
  STOP_AGREEMENT,
  WARN_AGREEMENT,
  WARN_AT,
} from "./constants.js";

/** Lengths at which to warn and to stop; 0 is never.
 * @typedef {{warnAt: number, stopAt: number, worthless: boolean}} OfflineLimits */

/** The calibrated limits.
 * @param {{lengths: number[], agreement: number[]}} curve
 * @returns {OfflineLimits} */
export function offlineLimits(curve) {
  const below = (/** @type {number} */ rate) =>
    curve.lengths.find((_, at) => curve.agreement[at] < rate) ?? 0;
  const stopAt = below(STOP_AGREEMENT);
  return { warnAt: below(WARN_AGREEMENT), stopAt, worthless: stopAt > 0 && stopAt <= FIRST_TOKENS };
}

/** Whether a growing text says again what it has said; each token is looked at once. */
class Phrases {
  /** @type {number[]} */
  text = [];
  seen = new Set();
  /** Of each token, whether the phrase that it ends was there before. @type {boolean[]} */
  again = [];

  /** Whether nearly all of the latest phrases are old ones, or most of a longer end.
   * @param {number[]} text */
  repeat(text) {
    if (text.length < this.text.length || this.text.some((id, at) => text[at] !== id)) {
      this.text = [];
      this.seen.clear();
      this.again = [];
    }
    for (let end = this.text.length + 1; end <= text.length; end++) {
      const phrase = end >= PHRASE ? text.slice(end - PHRASE, end).join() : "";
      this.again.push(phrase !== "" && this.seen.has(phrase));
      if (phrase) this.seen.add(phrase);
    }
    this.text = [...text];
    const old = (/** @type {number} */ within) => this.again.slice(-within).filter(Boolean).length;
    if (old(REPEATED_WITHIN) >= REPEATED_PHRASES) return true;
    return old(REPEATED_WITHIN_LONG) >= REPEATED_PHRASES_LONG;
  }
}

/** A growing text without the numbers of its items, as far as these count up; each token is looked
 * at once. */
class Unnumbered {
  /** @type {number[]} */
  text = [];
  /** What of it is kept. @type {number[]} */
  kept = [];
  /** The number at its end, until it is known whether it is an item's. @type {number[]} */
  digits = [];
  /** The numbers of items. @type {Set<number>} */
  numbers = new Set();
  /** Text of each token that was met. @type {Map<number, string>} */
  said = new Map();

  /** @param {(ids: number[]) => string} decode */
  constructor(decode) {
    this.decode = decode;
  }

  /** The text without these numbers, and without a number at its end. @param {number[]} text */
  of(text) {
    if (text.length < this.text.length || this.text.some((id, at) => text[at] !== id)) {
      this.text = [];
      this.kept = [];
      this.digits = [];
      this.numbers.clear();
    }
    for (const token of text.slice(this.text.length)) this.take(token);
    this.text = [...text];
    return this.kept;
  }

  /** Takes in the text's next token. @param {number} token */
  take(token) {
    const said = this.said.get(token) ?? this.decode([token]).trim();
    this.said.set(token, said);
    if (/^[0-9]+$/.test(said)) {
      this.digits.push(token);
      return;
    }
    if (!this.countsUp(said)) this.kept.push(...this.digits);
    this.digits = [];
    this.kept.push(token);
  }

  /** Whether the number with this behind it is an item's, and one more than another item's.
   * @param {string} behind */
  countsUp(behind) {
    const digits = this.digits.map((token) => this.said.get(token)).join("");
    if (!digits || digits.length > LONGEST_NUMBER || !/^[.):]+$/.test(behind)) return false;
    this.numbers.add(Number(digits));
    return this.numbers.has(Number(digits) - 1);
  }
}

/** Decides when to warn and when to stop, for one answer. The page has no records of the target, so
 * a bundle's `cold` limits hold. */
export class OfflineGuard {
  warned = false;
  phrases = new Phrases();

  /** @param {any} calibration of a bundle, or null
   * @param {(ids: number[]) => string} decode tells which tokens are numbers */
  constructor(calibration, decode) {
    this.unnumbered = new Unnumbered(decode);
    const curve = calibration?.cold ?? calibration?.offline;
    /** Whether the limits are of this drafter. */
    this.measured = Boolean(curve);
    /** @type {OfflineLimits} */
    this.limits = curve ? offlineLimits(curve) : { warnAt: WARN_AT, stopAt: 0, worthless: false };
  }

  /** The warning when so many tokens are unverified; once. @param {number} offline */
  warning(offline) {
    const { warnAt } = this.limits;
    if (!warnAt || offline < warnAt || this.warned) return "";
    this.warned = true;
    const alone = `${offline} tokens that nobody has verified`;
    if (this.measured) return `${alone}: from here on expect mistakes`;
    return `${alone}: how long this drafter can be trusted alone was not measured`;
  }

  /** Whether this unverified text must not grow. @param {number[]} offline */
  stops(offline) {
    const { worthless, stopAt } = this.limits;
    if (worthless || (stopAt > 0 && offline.length >= stopAt)) return true;
    if (offline.length < REPEATED_WITHIN) return false;
    return (
      new Set(offline.slice(-REPEATED_WITHIN)).size <= REPEATED_TOKENS ||
      this.phrases.repeat(this.unnumbered.of(offline))
    );
  }
}
