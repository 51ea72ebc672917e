// All deadlines of a turn, and when the machine must act next. As edge_client/turn/deadlines.py. Times are in seconds.

/** One look at the clock, and the next instant at which something is due: every wait lies in the future. */
export class Moment {
  /** @type {number | null} */
  next = null;

  /** @param {number} now */
  constructor(now) {
    this.now = now;
  }

  /** Whether this instant has passed; else the wait ends there at the latest. @param {number} at */
  reached(at) {
    if (!(at > this.now)) return true;
    if (this.next === null || at < this.next) this.next = at;
    return false;
  }
}

/** The configured waiting times: beyond the usual before the device writes offline; for the check of offline text once it
 * is complete; for an answer on a live connection; between offline tokens while an answer is only late. */
export const PATIENCE = { offlineAfter: 1, settle: 5, answer: 120, latePace: 0.05 };

/** Seconds without progress after which it counts no longer that the verifier says it works on it. */
const STALLED = 10;

/** They count from what a person sees: the last verified token, the last sign that the verifier works on the next one,
 * and the moment from which nothing more could be written. Refusals, new sessions, new connections and silence do not
 * restart them. */
export class Deadlines {
  /** @param {typeof PATIENCE} patience @param {import("./controller.js").Controller} controller
   * @param {number} now @param {number} unread tokens of the prompt that the verifier has not run yet */
  constructor(patience, controller, now, unread) {
    this.patience = patience;
    this.controller = controller;
    /** Since when the user has waited for a token. */
    this.waitingSince = now;
    this.unread = unread;
    this.askedAt = 0;
    /** @type {number | null} */
    this.downSince = null;
    /** Seconds that the pending answer may take without being late. */
    this.allowed = 0;
    /** Since when nothing more could be written. @type {number | null} */
    this.blockedSince = null;
    this.writtenAt = -Infinity;
    this.readAt = -Infinity;
    /** When the verifier last said that it works on the answer; that it had come further; and how far it was then. */
    this.heardAt = -Infinity;
    this.advancedAt = -Infinity;
    this.done = -1;
    /** Whether there was a request, or a provisional token, since the last verified one. */
    this.begun = false;
  }

  /** Seconds within which the answer to a request made now is expected. */
  get usual() {
    return this.controller.answerSeconds(this.unread);
  }

  /** A round was sent. @param {number} now */
  asked(now) {
    this.askedAt = now;
    this.done = -1;
    this.allowed = this.usual;
    if (!this.begun) this.waitingSince = now;
    this.begun = true;
  }

  /** The verifier works on the answer, and has read so many tokens for it. @param {number} done @param {number} now */
  heard(done, now) {
    if (done !== this.done) {
      this.done = done;
      this.advancedAt = now;
    }
    this.heardAt = now;
  }

  /** The device wrote a provisional token. @param {number} now */
  written(now) {
    this.writtenAt = now;
    this.begun = true;
  }

  /** Verified tokens arrived, for which the server worked so long. @param {number} now @param {number} server */
  progressed(now, server = 0) {
    this.waitingSince = Math.max(now, this.readAt);
    this.allowed = this.usual + server;
    this.blockedSince = null;
    this.begun = false;
  }

  /** The user read events since then: that is no waiting. @param {number} since @param {number} now */
  read(since, now) {
    this.waitingSince += now - since;
    if (this.blockedSince !== null) this.blockedSince += now - since;
    this.readAt = now;
  }

  /** The user waits once more. @param {number} now */
  restart(now) {
    this.waitingSince = now;
    this.blockedSince = null;
  }

  connected() {
    this.downSince = null;
  }

  /** The connection has been down since then. @param {number} since */
  lost(since) {
    this.downSince ??= since;
  }

  /** When the device may write its next offline token. */
  writeAt() {
    const { offlineAfter, latePace } = this.patience;
    if (this.downSince !== null) return Math.min(this.waitingSince, this.downSince) + offlineAfter;
    return Math.max(this.expectedAt + offlineAfter, this.writtenAt + latePace);
  }

  /** When a connection with a pending answer is given up. */
  giveUpAt() {
    return Math.max(this.askedAt, this.waitingSince, this.sign) + Math.max(this.patience.answer, 4 * this.allowed);
  }

  /** When a turn that cannot write must end; `patient`: the answer is only slow, and there is no text yet, or the user
   * does not wait for it. @param {number} now @param {boolean} patient */
  endAt(now, patient) {
    this.blockedSince ??= now;
    const patience = patient ? this.patience.answer : this.patience.settle;
    return Math.max(this.blockedSince, this.expectedAt) + patience;
  }

  /** The last sign of the verifier that counts. */
  get sign() {
    return Math.min(this.heardAt, this.advancedAt + Math.max(STALLED, 4 * this.allowed));
  }

  /** When the pending answer should be here at the latest. */
  get expectedAt() {
    return Math.max(this.waitingSince + this.allowed, this.sign);
  }
}

const WARN_AGREEMENT = 0.6, STOP_AGREEMENT = 0.3, FIRST_TOKENS = 4, REPEATED_WITHIN = 64, REPEATED_TOKENS = 10;
const PHRASE = 8, REPEATED_PHRASES = 58;

/** Limits of offline text, as edge_client/turn/guard.py: lengths at which to warn and to stop; 0 is never.
 * @typedef {{warnAt: number, stopAt: number, worthless: boolean}} OfflineLimits */

/** The calibrated limits; `stopAt` >= 0 overrides where it stops. @param {{lengths: number[], agreement: number[]}} curve
 * @param {number} stopAt @returns {OfflineLimits} */
export function offlineLimits(curve, stopAt) {
  const below = (/** @type {number} */ rate) => curve.lengths.find((_, i) => curve.agreement[i] < rate) ?? 0;
  const stop = below(STOP_AGREEMENT), warnAt = below(WARN_AGREEMENT);
  if (stopAt >= 0) return { warnAt, stopAt, worthless: false };
  return { warnAt, stopAt: stop, worthless: stop > 0 && stop <= FIRST_TOKENS };
}

/** Whether a growing text says again what it has said; each token is looked at once. */
class Phrases {
  /** @type {number[]} */
  text = [];
  seen = new Set();
  /** Of each token, whether the phrase that it ends was there before. @type {boolean[]} */
  again = [];

  /** Whether nearly all of the latest phrases are old ones. @param {number[]} text */
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
    return this.again.slice(-REPEATED_WITHIN).filter(Boolean).length >= REPEATED_PHRASES;
  }
}

/** Decides when to warn and when to stop, for one turn. */
export class OfflineGuard {
  warned = false;
  phrases = new Phrases();
  /** Whether the limits are of this drafter. */
  measured = true;

  /** @param {OfflineLimits} warm @param {OfflineLimits} cold without records @param {() => boolean} informed
   * @param {boolean} mayRepeat whether text that repeats itself goes on */
  constructor(warm, cold = warm, informed = () => true, mayRepeat = true) {
    this.mayRepeat = mayRepeat;
    this.warm = warm;
    this.cold = cold;
    this.informed = informed;
  }

  /** From a bundle's calibration. @param {any} calibration @param {number} stopAt @param {() => boolean} informed */
  static of(calibration, stopAt, informed) {
    const warm = calibration ? offlineLimits(calibration.offline, stopAt) : { warnAt: 64, stopAt: Math.max(0, stopAt), worthless: false };
    const cold = calibration?.cold ? offlineLimits(calibration.cold, stopAt) : warm;
    const guard = new OfflineGuard(warm, cold, informed, stopAt >= 0);
    guard.measured = Boolean(calibration);
    return guard;
  }

  get limits() {
    return this.informed() ? this.warm : this.cold;
  }

  /** The warning when so many tokens are unverified; once for each time offline. @param {number} offline */
  warning(offline) {
    const { warnAt } = this.limits;
    if (!warnAt || offline < warnAt || this.warned) return "";
    this.warned = true;
    if (!this.measured) return `${offline} tokens without the verifier: how long this drafter can be trusted alone was not measured`;
    return `${offline} tokens without the verifier: from here on expect mistakes`;
  }

  /** Whether this unverified text must not grow. @param {number[]} offline */
  stops(offline) {
    const { worthless, stopAt } = this.limits;
    if (worthless || (stopAt > 0 && offline.length >= stopAt)) return true;
    if (this.mayRepeat || offline.length < REPEATED_WITHIN) return false;
    return new Set(offline.slice(-REPEATED_WITHIN)).size <= REPEATED_TOKENS || this.phrases.repeat(offline);
  }
}
