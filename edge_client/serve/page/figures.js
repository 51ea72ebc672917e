// The figures above the conversation. Each says what it is of, and shows a dash while that is not
// known.

import { Figure } from "./figure.js";

function milliseconds(ms) {
  return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

function bytesPerSecond(bytes) {
  if (bytes < 1000) return `${Math.round(bytes)} B/s`;
  return `${(bytes / 1000).toFixed(1)} kB/s`;
}

export class Figures {
  constructor(parent) {
    const figure = (name, about, write) => new Figure(parent, name, write, about);
    this.rtt = figure("Round trip", "of a short message, there and back", milliseconds);
    this.tokensPerForward = figure(
      "Tokens a forward",
      "how many tokens one step of the target brought, in the answers that ended last: " +
        "more than one, where drafts were right",
      (tokens) => tokens.toFixed(1),
    );
    this.traffic = figure(
      "Traffic",
      "to and from the other end, in the last second",
      bytesPerSecond,
    );
    this.before = null;
  }

  // Takes the endpoint's status, asked for about once a second.
  take(status, now) {
    this.rtt.add(status.rtt_ms ?? null);
    const past = this.before;
    this.before = { ...status, now };
    if (!past || !goesOn(past, status)) {
      this.traffic.add(null);
      return;
    }
    const grown = (name) => (status[name] ?? 0) - (past[name] ?? 0);
    const forwards = grown("forwards");
    if (forwards > 0) this.tokensPerForward.add(grown("forward_tokens") / forwards);
    const seconds = Math.max(0.001, (now - past.now) / 1000);
    this.traffic.add((grown("sent_bytes") + grown("received_bytes")) / seconds);
  }

  // Nobody told the status: what was known before is not shown.
  unknown() {
    this.rtt.add(null);
    this.traffic.add(null);
    this.before = null;
  }
}

const COUNTS = ["sent_bytes", "received_bytes", "forwards", "forward_tokens"];

// Whether these counts are of the same verifier, which has not begun anew.
function goesOn(past, status) {
  if (past.verifier !== status.verifier) return false;
  return COUNTS.every((name) => (status[name] ?? 0) >= (past[name] ?? 0));
}
