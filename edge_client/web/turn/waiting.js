// When this device writes instead of the endpoint, and when it waits no longer. Pure; times are in
// seconds. They count silence: an endpoint that says it is at work is waited for. How long each
// wait is decides pacing.js.

import { waits } from "./pacing.js";

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
    /** Of a round trip, as far as it is known. */
    this.rtt = 0;
    this.began = false;
  }

  /** A request was sent. @param {number} now */
  asked(now) {
    this.downSince = null;
    this.heardAt = now;
  }

  /** Anything arrived. @param {number} now */
  heard(now) {
    this.heardAt = now;
  }

  /** Text, or news of how far the prompt is read. @param {number} now @param {boolean} text */
  progressed(now, text) {
    if (text && this.began) this.pause += PAUSE_WEIGHT * (now - this.progressedAt - this.pause);
    this.began ||= text;
    this.progressedAt = now;
  }

  /** @param {number} now */
  lost(now) {
    this.downSince ??= now;
  }

  /** This device wrote a token. @param {number} now */
  wrote(now) {
    this.wroteAt = now;
  }

  /** When this device may write its next token. */
  writeAt() {
    const { offline, silent, stalled, pace } = waits(this.rtt, this.pause);
    if (this.downSince !== null) return Math.min(this.progressedAt, this.downSince) + offline;
    const late = Math.min(this.heardAt + silent, this.progressedAt + stalled);
    return Math.max(late, this.wroteAt + pace);
  }

  /** When a connection with an answer on it is given up. */
  giveUpAt() {
    return this.heardAt + waits(this.rtt, this.pause).dead;
  }

  /** When an answer that cannot grow ends without a verifier; null: the endpoint is at work on it.
   * @param {number} blockedSince @param {number} settle */
  endAt(blockedSince, settle) {
    return this.downSince === null ? null : Math.max(blockedSince, this.downSince) + settle;
  }
}
