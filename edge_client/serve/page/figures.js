// The figures above the conversation.

import { Figure } from "./figure.js";

const bytes = (n) => (n < 1000 ? `${Math.round(n)} B/s` : `${(n / 1000).toFixed(1)} kB/s`);

export class Figures {
  constructor(parent) {
    const figure = (name, write) => new Figure(parent, name, write);
    this.rtt = figure("Round trip", (ms) => `${ms.toFixed(ms < 10 ? 1 : 0)} ms`);
    this.acceptance = figure("Accepted", (share) => `${(100 * share).toFixed(0)} %`);
    this.calls = figure("Verifier calls", (n) => String(n));
    this.traffic = figure("Traffic", bytes);
    this.before = null;
  }

  // Takes the endpoint's status, asked for about once a second.
  take(status, now) {
    const past = this.before ?? { ...status, now: now - 1 };
    const seconds = Math.max(0.001, (now - past.now) / 1000);
    const grown = (name) => Math.max(0, (status[name] ?? 0) - (past[name] ?? 0));
    const drafted = grown("drafted");
    this.rtt.add(status.rtt_ms ?? null);
    // Checks of text that the device wrote alone are accepted too, without having been drafts.
    if (drafted > 0) this.acceptance.add(Math.min(1, grown("accepted") / drafted));
    this.calls.add(status.calls ?? 0);
    this.traffic.add((grown("sent_bytes") + grown("received_bytes")) / seconds);
    this.before = { ...status, now };
  }
}
