// How long the page waits for what, by what it has measured. The rules of
// edge_client/turn/pacing.py, for an endpoint that gives a sign of life each second. Pure; times
// are in seconds.

import {
  ANSWER_TIMES,
  LATE_PACE,
  LONGEST,
  OFFLINE_AFTER,
  PACE_SHARE,
  RTT_TIMES,
  SIGN_SECONDS,
} from "./constants.js";

/** How late a sign may be on a good link: a busy page reads it late, too. */
const SIGN_LATE = 1.5;
/** So long the endpoint may say that it is there without a word of text, or of how far it has read.
 */
const STALLED = 3;
/** Signs that are missed before a connection is taken for dead. */
const SIGNS_MISSED = 10;

/** `offline`: from the loss of the connection until this device writes; `silent`: without any sign,
 * until it writes; `stalled`: without progress, until it writes; `pace`: between two tokens that it
 * writes while the endpoint is only late; `dead`: without any sign, until the connection is given
 * up.
 * @typedef {{offline: number, silent: number, stalled: number, pace: number, dead: number}} Waits
 */

/** The times for a round trip of the link, and the usual time between two pieces of an answer.
 * @param {number} rtt @param {number} answer @returns {Waits} */
export function waits(rtt, answer) {
  return {
    offline: atLeast(OFFLINE_AFTER, RTT_TIMES * rtt),
    silent: SIGN_SECONDS + atLeast(SIGN_LATE, RTT_TIMES * rtt),
    stalled: Math.max(STALLED, ANSWER_TIMES * answer),
    pace: Math.max(LATE_PACE, answer / PACE_SHARE),
    dead: SIGNS_MISSED * SIGN_SECONDS + RTT_TIMES * rtt,
  };
}

/** @param {number} floor @param {number} measured */
function atLeast(floor, measured) {
  return Math.max(floor, Math.min(measured, LONGEST));
}
