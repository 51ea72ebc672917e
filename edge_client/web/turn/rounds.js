// A turn by rounds: a draft goes up, and its verdict is awaited. As edge_client/turn/rounds.py.

/** @typedef {import("./tree.js").DraftTree} DraftTree */

const QUICK = 0.005;

/** The next round, and what its verdict teaches. */
export class Rounds {
  /** @param {import("./transcript.js").Transcript} transcript @param {import("./controller.js").Controller} controller
   * @param {import("./records.js").Records} records @param {import("./stats.js").Stats} stats */
  constructor(transcript, controller, records, stats) {
    this.transcript = transcript;
    this.controller = controller;
    this.records = records;
    this.stats = stats;
    /** Whether the verifier makes activation records. */
    this.recordService = false;
    /** The draft that is being verified. @type {DraftTree | null} */
    this.draft = null;
    /** Deadline for waiting on the prompt's records; null before the first verdict. @type {number | null} */
    this.recordsUntil = null;
  }

  /** The round that needs no drafter: offline text. */
  check() {
    const { transcript } = this;
    return transcript.provisional.length ? transcript.session.verify(transcript.bulk(this.controller.maxChain + 1)) : null;
  }

  /** The round to ask for, or the draft to make for it; null while the prompt's records are awaited.
   * @param {import("./controller.js").Plan} plan @param {import("./deadlines.js").Moment} moment
   * @returns {import("./messages.js").Message | null} */
  next(plan, moment) {
    const { log } = this.transcript.session;
    if (plan.whoDrafts === "single") return this.drafted({ tokens: [log[log.length - 1]], parents: [-1], scores: [0] });
    if (this.waitsForRecords(moment)) return null;
    return { kind: "draft", ids: log, shape: plan.shape, quick: plan.drafting < QUICK };
  }

  /** The round of a draft. @param {DraftTree} tree */
  drafted(tree) {
    this.draft = tree;
    const chain = tree.parents.every((parent, node) => parent === node - 1);
    return this.transcript.session.verify(tree.tokens, chain ? [] : tree.parents);
  }

  /** A verdict came; `prompt`: the prompt had to be read first. @param {any} event @param {number} waited @param {boolean} prompt */
  answered(event, waited, prompt) {
    const accepted = event.path.length - 1, server = (event.queue_ms + event.forward_ms) / 1000;
    this.stats.rounds++;
    this.stats.accepted += accepted;
    if (this.draft) {
      // The first verdict of a turn also waited for the prompt, so its wait does not predict the next.
      this.controller.verified(this.draft, accepted, prompt ? event.forward_ms / 1000 : server);
      this.controller.rtt.add(waited - server);
    } else if (!this.controller.forward.known) this.controller.forward.observe(1, event.forward_ms / 1000);
    this.draft = null;
  }

  /** The answer will not be that of the draft. */
  forget() {
    this.draft = null;
  }

  /** Whether records of the prompt are still to come. */
  get lacksRecords() {
    return this.recordService && this.records.misses(this.transcript.rules.start);
  }

  /** The prompt's records follow its first verdict, and without them only half as many tokens are accepted: wait for
   * them, at most half a round. @param {import("./deadlines.js").Moment} moment */
  waitsForRecords(moment) {
    if (!this.transcript.length || !this.lacksRecords) return false;
    this.recordsUntil ??= moment.now + (this.controller.rtt.smoothed + this.controller.forward.seconds(1)) / 2;
    return !moment.reached(this.recordsUntil);
  }
}
