// Whether the verifier can be asked in a turn: the link, the session on it, failures and what they mean. As
// reachability.py and session_state.py of edge_client/turn/, and edge_client/link/retry.py.

import { safeLine } from "./text.js";

/** @typedef {import("./messages.js").Message} Message */

const SETBACKS = 8, LOSSES = 32, LONGEST_WAIT = 300;

/** Counts attempts in a row without progress. The pause doubles from `first` to `longest` seconds, and is random between
 * half and all of that. */
export class Retry {
  attempts = 0;
  notBefore = 0;

  /** @param {number} first @param {number} longest @param {() => number} jitter */
  constructor(first, longest, jitter) {
    this.first = first;
    this.longest = longest;
    this.jitter = jitter;
  }

  /** An attempt failed; the other end may have asked for a pause. @param {number} now @param {number} askedWait */
  failed(now, askedWait = 0) {
    let pause = Math.min(this.longest, this.first * 2 ** Math.min(this.attempts, 30));
    pause *= 0.5 + 0.5 * this.jitter();
    const asked = Math.min(askedWait, LONGEST_WAIT) * (1 + 0.25 * this.jitter());
    this.attempts++;
    this.notBefore = now + Math.max(pause, asked);
  }

  progressed() {
    this.attempts = this.notBefore = 0;
  }
}

/** One session on one connection at a time: opened, resumed, or waiting for a retry. */
export class SessionState {
  /** The connection that the session was last brought up on; 0 for none. */
  connection = 0;
  /** Whether rounds may be sent: the session is open on this connection, or its opening is on the way. */
  established = false;
  /** When a refused request is to be sent again. @type {number | null} */
  againAt = null;

  /** @param {import("./session.js").ClientSession} session */
  constructor(session) {
    this.session = session;
  }

  get usable() {
    return this.established && this.againAt === null;
  }

  /** What to send first on a connection. @param {number} connection */
  bringUp(connection) {
    const { session } = this, before = this.connection;
    this.connection = connection;
    this.againAt = null;
    this.established = !session.settled || connection === before;
    if (!this.established) return session.recover();
    return session.settled || session.unsettled.length ? [...session.unsettled] : [session.open()];
  }

  lost() {
    this.established = false;
    this.againAt = null;
  }

  /** Nothing is sent before `at`; then unanswered requests are sent again. @param {number} at */
  repeat(at) {
    this.established = true;
    this.againAt = at;
  }

  /** The requests to send again now. @param {import("./deadlines.js").Moment} moment */
  due(moment) {
    if (this.againAt === null || !moment.reached(this.againAt)) return [];
    this.againAt = null;
    return [...this.session.unsettled];
  }
}

/** The link to the verifier, for one turn. */
export class Reachability {
  /** @type {"down" | "up" | "refused"} */
  link = "down";
  /** Why the verifier is not asked again in this turn. */
  givenUp = "";
  /** Failed attempts in a row to repair the session. */
  setbacks = 0;
  losses = 0;
  whyDown = "";

  /** @param {boolean} linked whether there is a verifier at all @param {Retry} retry */
  constructor(linked, retry) {
    this.linked = linked;
    this.retry = retry;
  }

  get usable() {
    return this.link === "up" && !this.givenUp;
  }

  /** Whether waiting for the verifier is useless in this turn. */
  get hopeless() {
    return !this.linked || this.link === "refused" || this.givenUp !== "";
  }

  /** The connection is down; returns whether it was lost too often. @param {string} why @param {boolean} refused */
  lost(why, refused) {
    const up = this.link === "up";
    this.losses += Number(up);
    this.link = refused ? "refused" : "down";
    this.whyDown = safeLine(why);
    return up && this.losses >= LOSSES;
  }

  /** An attempt to repair the session is needed; returns whether there were too many. */
  setback() {
    return ++this.setbacks >= SETBACKS;
  }

  /** Verified tokens arrived: failures are counted from zero. */
  progressed() {
    this.retry.progressed();
    this.setbacks = this.losses = 0;
  }

  /** Forget the failures: the turn waits once more. */
  tryAgain() {
    this.givenUp = "";
    this.setbacks = this.losses = 0;
  }

  /** The state of the link while the device writes offline. @returns {[string, string]} */
  news() {
    if (!this.linked) return ["none", ""];
    if (this.givenUp) return ["refused", this.givenUp];
    if (this.link === "up") return ["late", ""];
    if (this.link === "refused") return ["refused", this.whyDown];
    return this.whyDown ? ["offline", this.whyDown] : ["connecting", ""];
  }
}

/** What a refusal means: `later` send the same again after a pause; `unknown` open the session again; `broken` continue
 * in a new session; `final` continue offline in this turn. @param {string} code */
export function classify(code) {
  if (["busy", "deadline", "draining", "internal", "cancelled"].includes(code)) return "later";
  if (["unknown_session", "quarantined"].includes(code)) return "unknown";
  return code === "conflict" ? "broken" : "final";
}
