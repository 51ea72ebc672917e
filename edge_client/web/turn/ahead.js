// A turn as a stream, with guesses sent ahead of the answers. As edge_client/turn/ahead.py, where the numbers are
// explained.

import { GUESSED } from "./controller.js";
import { GuessTree, negLogProbsOf } from "./guesses.js";
import { bestFirst, chain, subtree } from "./tree.js";

/** @typedef {import("./messages.js").Message} Message */
/** @typedef {import("./tree.js").DraftTree} DraftTree */

const LEAST_WAITING = 0.01, LEAST_BESIDE = 0.1, SEND = 0.25, MOST = 256, FEW = 6, MANY = 16;
const AGAIN_SECONDS = 0.5, MOST_AGAIN = 4;

/** The streams of one turn, and the guesses for them. */
export class Ahead {
  /** @param {import("./transcript.js").Transcript} transcript @param {import("./controller.js").Controller} controller
   * @param {import("./deadlines.js").Deadlines} deadlines @param {import("./stats.js").Stats} stats
   * @param {boolean} wanted whether guesses are allowed @param {boolean} chooses whether the server may draft, too */
  constructor(transcript, controller, deadlines, stats, wanted, chooses) {
    this.transcript = transcript;
    this.controller = controller;
    this.deadlines = deadlines;
    this.stats = stats;
    this.wanted = wanted;
    this.chooses = chooses;
    this.supported = false;
    /** Of the draft that a round of the device would have. */
    this.shape = chain(4);
    this.serverDrafts = true;
    /** When the stream last brought tokens. @type {number | null} */
    this.answeredAt = null;
    /** Mirrors the guesses at the verifier. */
    this.sent = new GuessTree();
    /** The stream that they were sent for. @type {Message | null} */
    this.stream = null;
    /** Whether the verifier is to wait for guesses. */
    this.waits = false;
    /** The same, as the verifier has it; null: unknown, since the connection was lost. @type {boolean | null} */
    this.waitsThere = false;
    /** Until then answers may be from before the latest change of that. */
    this.changedAt = 0;
    /** @type {import("./guesses.js").GuessTreeGrower | null} */
    this.tree = null;
    /** Length of the log that the tree was grown for. */
    this.length = 0;
    this.againAt = Infinity;
    /** How often everything was sent again since the last token. */
    this.again = 0;
    /** When guesses went to a verifier that waits and has none: the next tokens are their answer. @type {number | null} */
    this.askedAt = null;
  }

  /** Whether this verifier supports guesses for streams. */
  get on() {
    return this.wanted && this.supported;
  }

  /** @param {Message} welcome */
  agreed({ features }) {
    this.supported = features.includes("foresee") && features.includes("stream");
  }

  /** A new connection or session: the verifier may have no guesses any more, or still wait for them. */
  lost() {
    this.sent.clear();
    this.stream = this.waitsThere = this.tree = this.askedAt = null;
  }

  /** The stream to ask for. @param {import("./controller.js").Plan} plan */
  begin(plan) {
    this.shape = plan.shape;
    this.answeredAt = null;
    this.serverDrafts = plan.whoDrafts === "server";
    this.waitsThere = plan.whoDrafts === "device";
    return this.transcript.session.stream({ speculate: this.serverDrafts, waits: this.waitsThere });
  }

  /** The drafter has grown the tree. @param {number} length @param {import("./guesses.js").GuessTreeGrower} tree */
  grew(length, tree) {
    this.tree = tree;
    this.length = length;
  }

  // ---- what answers teach

  /** A stream has answered. @param {any} event @param {number} now */
  answered(event, now) {
    this.measure(event, now);
    if (!event.tokens.length) return;
    if (!this.waits && this.on) this.controller.usefulness.forward(event.foreseen > 0);
    this.judge(event.tokens);
    if (this.askedAt !== null) {
      this.controller.rtt.add(now - this.askedAt - (event.queue_ms + event.forward_ms) / 1000);
      this.askedAt = null;
    }
    this.again = 0;
    this.sent.follow(this.transcript.session.log);
    this.expect(now);
  }

  /** The pace of the stream. @param {any} event @param {number} now */
  measure({ tokens, foreseen, forward_ms }, now) {
    if (this.answeredAt !== null && tokens.length && this.answeredAt >= this.changedAt) {
      this.controller.streamed(tokens.length, now - this.answeredAt, this.serverDrafts, forward_ms / 1000);
    }
    this.answeredAt = now;
    if (!foreseen) return;
    this.stats.rounds++;
    this.stats.accepted += tokens.length - 1;
    this.stats.drafted += foreseen;
  }

  /** How many guesses in a row were right. @param {number[]} tokens */
  judge(tokens) {
    /** @type {[number, boolean] | null} */
    let run = null;
    if (this.tree && this.length === this.transcript.session.log.length - tokens.length) {
      run = this.tree.won(tokens);
      this.controller.guessed(...run);
    }
    if (this.stream) {
      const outcome = this.sent.judge(tokens);
      if (this.waits && this.waitsThere) {
        // a verifier that waits stands still where guesses end
        const ended = outcome === "missed" || outcome === "beyond";
        run = [tokens.length - Number(ended), ended];
      }
    }
    if (run) this.controller.streak.add(...run);
  }

  // ---- what to do while the stream runs

  /** The most useful action for the running stream, if any: a `foresee` to send, or a `grow`.
   * @param {import("./deadlines.js").Moment} moment @returns {Message | null} */
  next(moment) {
    const { session, provisional } = this.transcript, { now } = moment;
    const stream = session.streaming, { log } = session;
    if (!this.on || !stream) return null;
    if (this.stream?.round !== stream.round || this.stream?.session !== stream.session) {
      const there = this.waitsThere;
      this.lost();
      this.stream = stream;
      this.waits = stream.waits;
      this.waitsThere = there;
      this.expect(now);
    }
    if (this.chooses) {
      this.choose(now);
      if (this.waitsThere !== this.waits && (this.waitsThere !== false || this.sent.size)) {
        return this.send({ tokens: [log[log.length - 1]], parents: [-1], scores: [0] }, [], now);
      }
    }
    if (!this.waits && this.controller.usefulness.rests) return null;
    if (this.waits && moment.reached(this.againAt)) {
      this.sent.clear();
      this.again = Math.min(this.again + 1, MOST_AGAIN);
      this.expect(now);
      moment.reached(this.againAt);
    }
    this.sent.follow(log);
    if (provisional.length) {
      // it is what the device would guess, and it must be checked
      const tokens = [log[log.length - 1], ...provisional.slice(0, this.controller.maxNodes)];
      const text = { tokens, parents: tokens.map((_, i) => i - 1), scores: tokens.map(() => 0) };
      return this.send(text, this.sent.missing(text), now);
    }
    const least = this.waits ? LEAST_WAITING : LEAST_BESIDE;
    const grow = { kind: "grow", ids: log, breadth: GUESSED, least: Math.log(SEND * least) };
    const { tree } = this;
    if (!tree || this.length !== log.length || tree.root !== log[log.length - 1]) return grow;
    const done = tree.tree.tokens.length >= MOST || tree.likeliestOpen < Math.log(least);
    const fresh = this.fresh(tree, least, done);
    if (fresh.length && (done || this.enough(tree, fresh))) return this.send(tree.tree, fresh, now);
    return done ? null : grow;
  }

  /** Whether the verifier is to wait for guesses from now on. @param {number} now */
  choose(now) {
    const waits = this.controller.waits(this.transcript.remaining, this.waits);
    if (waits === this.waits) return;
    this.waits = waits;
    this.serverDrafts = !waits;
    this.changedAt = now + this.controller.rtt.smoothed;
  }

  /** The guesses to send: new, likely, and there in time. @param {import("./guesses.js").GuessTreeGrower} tree
   * @param {number} least @param {boolean} done */
  fresh(tree, least, done) {
    const missing = this.sent.missing(tree.tree), { scores } = tree.tree;
    // A server that drafts advances until they arrive.
    const lead = this.waits ? 0 : this.controller.rate * this.controller.rtt.smoothed;
    const fresh = missing.filter((node) => tree.depths[node] > lead && scores[node] >= Math.log(SEND * least));
    if (fresh.length || !done || !this.waits || this.sent.size) return fresh;
    return bestFirst([...missing].reverse(), scores).slice(0, 1); // the verifier stands still: any guess will do
  }

  /** Whether to send now rather than grow on. @param {import("./guesses.js").GuessTreeGrower} tree @param {number[]} fresh */
  enough(tree, fresh) {
    if (this.sent.size || !this.waits) return fresh.length >= (this.sent.size > MANY ? MANY : FEW);
    const { scores } = tree.tree;
    const deepest = fresh.reduce((best, node) => {
      const deeper = tree.depths[node] - tree.depths[best] || scores[node] - scores[best];
      return deeper > 0 ? node : best;
    });
    return tree.depths[deepest] >= this.shape.depth || tree.likeliestOpen < this.shape.minScore;
  }

  /** The likeliest of these nodes, with the paths to them, as many as fit into a message.
   * @param {DraftTree} tree @param {number[]} fresh @param {number} now */
  send(tree, fresh, now) {
    const kept = new Set([0]);
    for (const node of bestFirst([...fresh], tree.scores)) {
      const path = [node];
      while (!kept.has(tree.parents[path[path.length - 1]])) path.push(tree.parents[path[path.length - 1]]);
      if (kept.size + path.length <= this.controller.maxNodes) path.forEach((at) => kept.add(at));
    }
    const waits = this.waits !== this.waitsThere ? this.waits : null;
    if (kept.size < 2 && waits === null) return null;
    const { session } = this.transcript;
    const part = subtree(tree, [...kept].sort((a, b) => a - b));
    const guesses = session.foresee(part.tokens, part.parents, negLogProbsOf(part), waits);
    this.waitsThere = this.waits;
    if (this.waits && !this.sent.size && now >= this.changedAt) {
      this.askedAt = null; // of guesses that were sent again it is unknown which message is answered
      if (!this.again) {
        this.askedAt = now;
        this.deadlines.asked(now);
      }
    }
    this.sent.add(session.log, guesses);
    this.stats.guessMessages++;
    this.expect(now);
    return guesses;
  }

  /** An answer is expected, or guesses were lost. @param {number} now */
  expect(now) {
    this.againAt = now + (2 * this.deadlines.usual + AGAIN_SECONDS) * 2 ** this.again;
  }
}
