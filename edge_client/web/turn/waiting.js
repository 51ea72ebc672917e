// When this device writes instead of the endpoint, and when it waits no longer. Pure; times are in seconds. They count
// silence: an endpoint that says it is at work is waited for.

import { LATE_PACE, OFFLINE_AFTER, SIGN_SECONDS } from "./constants.js";

/** A connection that is silent for so long is taken for late, and for dead. */
export const SILENT = SIGN_SECONDS + 1.5;
const DEAD = 10 * SIGN_SECONDS;
/** So long the endpoint may be at work without a word of text, or of how far it has read; and by its usual pause. */
const LATE = 3;
const LATE_PAUSES = 4;
const PAUSE_WEIGHT = 0.2;

export class Waiting {
  /** @param {number} now @param {number | null} downSince */
  constructor(now, downSince) {
    /** Since when there has been no connection; null while there is one. */
    this.downSince = downSince;
    /** When anything arrived, and when text or progress did. */
    this.heardAt = now;
    this.progressedAt = now;
    this.wroteAt = -Infinity;
    /** Seconds between two pieces of text, usually. */
    this.pause = 0;
    this.began = false;
  }

  /** A request was sent. @param {number} now */
  asked(now) {
    this.downSince = null;
    this.heardAt = now;
  }

  /** Anything arrived. @param {number} now */
  heard(now) { this.heardAt = now; }

  /** Text, or news of how far the prompt is read. @param {number} now @param {boolean} text */
  progressed(now, text) {
    if (text && this.began) this.pause += PAUSE_WEIGHT * (now - this.progressedAt - this.pause);
    this.began ||= text;
    this.progressedAt = now;
  }

  /** @param {number} now */
  lost(now) { this.downSince ??= now; }

  /** This device wrote a token. @param {number} now */
  wrote(now) { this.wroteAt = now; }

  /** When this device may write its next token. */
  writeAt() {
    if (this.downSince !== null) return Math.min(this.progressedAt, this.downSince) + OFFLINE_AFTER;
    const late = Math.min(this.heardAt + SILENT, this.progressedAt + Math.max(LATE, LATE_PAUSES * this.pause));
    return Math.max(late, this.wroteAt + LATE_PACE);
  }

  /** When a connection with an answer on it is given up. */
  giveUpAt() { return this.heardAt + DEAD; }

  /** When an answer that cannot grow ends without a verifier; null: the endpoint is at work on it.
   * @param {number} blockedSince @param {number} settle */
  endAt(blockedSince, settle) {
    return this.downSince === null ? null : Math.max(blockedSince, this.downSince) + settle;
  }
}
