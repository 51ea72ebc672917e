// Who drafts, and how deep: the plan with the most expected verified tokens a second. As edge_client/turn/controller.py,
// where the numbers are explained.

import { Cost, LevelRates, Pace, RoundTrip, Smoothed, Streak } from "./estimates.js";
import { chain, depths } from "./tree.js";

/** @typedef {import("./tree.js").TreeShape} TreeShape */
/** @typedef {"auto" | "device" | "server" | "none" | "single"} WhoDrafts */
/** The plan for the next round; `shape` is used if the device drafts, which takes `drafting` seconds.
 * @typedef {{whoDrafts: WhoDrafts, shape: TreeShape, speed: number, drafting: number}} Plan */

/** Guesses that a step of the drafter makes. */
export const GUESSED = 4;
const CHAINS = [1, 2, 3, 4, 6, 8, 12, 16];
const TREES = [[4, 3, 12], [4, 5, 24], [8, 6, 48], [4, 12, 48], [4, 16, 62]];
const DEPTHS = 16, LEAST_PROBABILITY = 1e-5, BLIND_TOKENS = 4;
const PRIOR_CHAIN = 0.65, PRIOR_TREE = 0.75, PRIOR_GUESSES = 4, PRIOR_FORWARD = 0.03, PRIOR_STEP = 0.003;
const PER_FORWARD = 8, WAITING_MARGIN = 1.15, SERVER_MARGIN = 1.05, EVIDENCE = 16, EARLIER = 8;
const UNUSED = 16, FIRST_REST = 32, LONGEST_REST = 512, TRIES = 5;

/** Whether a server that drafts too uses the guesses; if not, the device rests for 32 forwards, then 64, up to 512. */
export class Usefulness {
  pause = FIRST_REST;
  /** Forwards in a row without a guess in time; below 0 the device rests. */
  unused = 0;
  /** Forwards of a new text over which it does not rest. */
  tries = 0;

  get rests() {
    return this.unused < 0 && !this.tries;
  }

  begin() {
    this.tries = TRIES;
  }

  /** A forward of such a stream ran; `used`: over guesses of the device. @param {boolean} used */
  forward(used) {
    this.tries = Math.max(0, this.tries - 1);
    this.unused++;
    if (used) {
      this.pause = FIRST_REST;
      this.unused = 0;
    } else if (this.unused >= UNUSED) {
      this.unused = -this.pause;
      this.pause = Math.min(2 * this.pause, LONGEST_REST);
    }
  }
}

/** Measures and decides. */
export class Controller {
  constructor(rtt = new RoundTrip()) {
    this.rtt = rtt;
    this.canStream = this.canTree = true;
    this.maxNodes = 63;
    this.maxChain = 255;
    /** Of a verification by its nodes, the wait in the server's queue included. */
    this.forward = new Cost(PRIOR_FORWARD);
    /** Of a step of the drafter by its width; and over a piece of a prompt. */
    this.step = new Cost(PRIOR_STEP);
    this.pace = new Pace();
    this.streak = new Streak(PRIOR_TREE, PRIOR_GUESSES);
    /** Seconds that the server needs for a token of a prompt. */
    this.prefill = new Smoothed();
    this.usefulness = new Usefulness();
    this.chains = new LevelRates(Array(DEPTHS).fill(PRIOR_CHAIN));
    this.trees = new LevelRates(Array(DEPTHS).fill(PRIOR_TREE));
  }

  // ---- what was measured

  /** Start from the acceptance of a bundle's calibration: the chances that a draft gets so far.
   * @param {{chain: number[], tree: number[]}} reached */
  calibrate(reached) {
    const rates = (/** @type {number[]} */ so) => so.map((now, i) => ((i ? so[i - 1] : 1) > 0 ? now / (i ? so[i - 1] : 1) : 0));
    const [chains, trees] = [rates(reached.chain), rates(reached.tree)];
    const levels = (/** @type {number[]} */ known) =>
      new LevelRates(Array.from({ length: DEPTHS }, (_, level) => known[Math.min(level, known.length - 1)]));
    if (chains.length) this.chains = levels(chains);
    if (!trees.length) return;
    this.trees = levels(trees);
    this.streak = new Streak(trees.reduce((a, b) => a + b) / trees.length, PRIOR_GUESSES);
  }

  /** A turn begins, maybe with text of another kind. */
  begin() {
    this.streak.begin(EARLIER);
    this.usefulness.begin();
  }

  /** What this verifier can do, and its limits. @param {import("./messages.js").Message} welcome */
  agreed(welcome) {
    this.canStream = welcome.features.includes("stream");
    this.canTree = welcome.features.includes("tree");
    this.maxNodes = welcome.limits.max_tree_nodes - 1;
    this.maxChain = welcome.limits.max_chain_tokens - 1;
  }

  /** A round came back. @param {import("./tree.js").DraftTree} tree @param {number} accepted @param {number} seconds */
  verified(tree, accepted, seconds) {
    const depth = Math.max(...depths(tree.parents));
    const branching = tree.parents.some((parent, node) => parent !== node - 1);
    if (depth) (branching ? this.trees : this.chains).add(accepted, depth);
    this.forward.observe(tree.tokens.length, seconds);
  }

  /** Of new tokens `won` were guessed; `wrong`: there were other guesses for the next. @param {number} won @param {boolean} wrong */
  guessed(won, wrong) {
    this.trees.add(won, won + Number(wrong));
  }

  /** Tokens of a stream arrived. @param {number} tokens @param {number} seconds @param {boolean} drafts @param {number} server */
  streamed(tokens, seconds, drafts, server) {
    if (drafts) this.pace.add(tokens, seconds);
    if (server > 0) this.forward.observe(1, server);
  }

  // ---- what to do

  /** Seconds within which an answer is expected, if so much of the prompt must be read first. @param {number} unread */
  answerSeconds(unread = 0) {
    const forward = this.forward.known ? this.forward.seconds(1) : 0;
    return this.rtt.usual(forward) + unread * this.prefill.value;
  }

  /** The next round, if at most `remaining` tokens are left. `blind`: made without the prompt's records; `guesses`: for a
   * stream with guesses. @param {number} remaining @param {WhoDrafts} who @param {{blind?: boolean, guesses?: boolean}} how */
  plan(remaining, who = "auto", { blind = false, guesses = false } = {}) {
    const device = this.bestDevice(remaining);
    if (who === "auto") who = guesses || this.streamPays(device, remaining) ? "server" : "device";
    if (who === "single" || (who !== "device" && this.canStream)) return { whoDrafts: who, shape: device.shape, speed: 0, drafting: 0 };
    return blind && device.whoDrafts === "device" ? this.bestDevice(Math.min(remaining, BLIND_TOKENS)) : device;
  }

  /** @param {Plan} device @param {number} remaining */
  streamPays(device, remaining) {
    const tokens = Math.max(1, Math.min(remaining, 64));
    const stream = tokens / (this.rtt.smoothed + tokens / this.rate);
    return stream > SERVER_MARGIN * device.speed;
  }

  /** Whether the verifier of a running stream should wait for the device's guesses; `now`: it does so already.
   * @param {number} remaining @param {boolean} now */
  waits(remaining, now) {
    if (this.streak.judged < EVIDENCE) return now;
    if (now) return this.guessedSpeed(remaining, this.streak.length) > this.rate;
    return this.guessedSpeed(remaining, this.streak.atLeast) > WAITING_MARGIN * this.rate;
  }

  /** @param {number} remaining @param {number} streak */
  guessedSpeed(remaining, streak) {
    const run = Math.min(Math.max(1, remaining), 1 + streak);
    const forwards = Math.max(1, 0.5 + run / PER_FORWARD);
    const drafting = this.step.seconds(1) + 3 * this.step.seconds(GUESSED);
    const waited = this.rtt.smoothed + drafting + forwards * this.forward.seconds(PER_FORWARD);
    return run / Math.max(waited, run * this.step.seconds(GUESSED));
  }

  /** @param {number} remaining @returns {Plan} */
  bestDevice(remaining) {
    const roundTrip = this.rtt.smoothed, most = Math.max(1, remaining);
    const shapes = CHAINS.filter((depth) => depth <= this.maxChain).map(chain);
    if (this.canTree && this.maxNodes > 0) {
      for (const [breadth, depth, nodes] of TREES) {
        shapes.push({ ...chain(depth), breadth, nodes: Math.min(nodes, this.maxNodes) });
      }
    }
    /** @type {Plan} */
    let best = { whoDrafts: "device", shape: chain(1), speed: 0, drafting: 0 };
    if (!shapes.length) best = { ...best, whoDrafts: "single", speed: 1 / Math.max(1e-6, roundTrip) };
    for (const shape of shapes) {
      const tokens = Math.min(1 + (shape.breadth > 1 ? this.trees : this.chains).totals[shape.depth - 1], most);
      const drafting = this.step.seconds(1) + (shape.depth - 1) * this.step.seconds(shape.breadth);
      const speed = tokens / (roundTrip + this.forward.seconds(shape.nodes + 1) + drafting);
      if (speed > best.speed) best = { whoDrafts: "device", shape, speed, drafting };
    }
    // One more level wins the probability of the best path, and costs the tokens of one step's time.
    const least = Math.log(Math.max(LEAST_PROBABILITY, this.step.seconds(best.shape.breadth) * best.speed));
    return { ...best, shape: { ...best.shape, minScore: Math.min(0, least) } };
  }

  /** Tokens a second of a stream that the server drafts, once it has begun. */
  get rate() {
    return this.pace.rate || (1 + this.chains.totals[3]) / (1.3 * this.forward.seconds(5));
  }
}
