// The device's side of a session, as moa/wire/session.py: what to send, what an answer means, and how to recover what
// was lost with a connection. The log has verified tokens only.

import { chainHash } from "./chain.js";
import { RETRYABLE, message } from "./messages.js";
import { Ranges } from "./ranges.js";
import { ProtocolError, same } from "./text.js";

/** @typedef {import("./messages.js").Message} Message */

/** What an answer means: `ready`; `advanced` by verified `tokens` after position `base` (`path`: the accepted nodes of a
 * draft); `recovered` once `resend` is sent; `refused`; or null for a repetition.
 * @typedef {{kind: string, [field: string]: any}} SessionEvent */

const ASKS = ["verify", "stream"];

export class ClientSession {
  /** @param {Record<string, any>} settings its fields; `log` (the prompt) and `id` are needed */
  constructor(settings) {
    /** @type {number[]} */
    this.log = settings.log;
    /** @type {Uint8Array} */
    this.id = settings.id;
    this.maxNewTokens = settings.maxNewTokens ?? 512;
    this.sampling = settings.sampling;
    /** @type {string[]} */
    this.stop = settings.stop ?? [];
    this.ignoreEos = settings.ignoreEos ?? false;
    this.records = settings.records ?? "int8";
    /** Vocabulary of the target, once known. */
    this.vocabSize = 2 ** 31;
    /** Tokens of the log that the server is known to have. */
    this.settled = 0;
    /** The last settled round. */
    this.round = 0;
    this.epoch = 0;
    this.finish = "";
    /** Position of this turn's first token. @type {number} */
    this.turnStart = settings.turnStart ?? this.log.length;
    this.held = new Ranges(settings.held);
    /** Requests without an answer yet, in order. @type {Message[]} */
    this.unsettled = [];
    this.resuming = false;
  }

  /** Another one that goes on from `log`. @param {number[]} log @param {Uint8Array} id */
  successor(log, id) {
    return new ClientSession({ ...this, log, id });
  }

  /** Position of the pending token. */
  get base() {
    return this.log.length - 1;
  }

  /** Whether a round is under way. */
  get busy() {
    return this.unsettled.some((request) => ASKS.includes(request.kind));
  }

  /** The stream under way. */
  get streaming() {
    return this.unsettled.find((request) => request.kind === "stream");
  }

  /** Whether an opening has not been answered yet. */
  get opening() {
    return this.unsettled.some((request) => request.kind === "open");
  }

  /** The unanswered request of this round. @param {number} round */
  asked(round) {
    return this.unsettled.find((request) => ASKS.includes(request.kind) && request.round === round);
  }

  // ---- what to send

  /** The first message. */
  open() {
    return this.ask(this.opened(this.log));
  }

  /** The next turn; its ids are added to the log at once. @param {number[]} ids @param {Record<string, any>} turn */
  append(ids, turn) {
    this.free();
    this.maxNewTokens = turn.maxNewTokens;
    this.stop = turn.stop;
    this.ignoreEos = turn.ignoreEos;
    const request = message("append", {
      session: this.id,
      base: this.log.length,
      ids,
      max_new_tokens: this.maxNewTokens,
      stop: this.stop,
      ignore_eos: this.ignoreEos,
    });
    this.log.push(...ids);
    this.finish = "";
    this.turnStart = this.log.length;
    return this.ask(request);
  }

  /** The next round: `tokens[0]` is the pending token. Without `parents` it is a chain.
   * @param {number[]} tokens @param {number[]} parents */
  verify(tokens, parents = []) {
    this.free();
    if (tokens[0] !== this.log[this.base]) throw new ProtocolError("node 0 of a draft must be the pending token");
    return this.ask(this.next("verify", { tokens, parents }));
  }

  /** The next round: drafted by the server, decoded there without a draft, or only by guesses.
   * @param {{speculate: boolean, waits: boolean}} how */
  stream(how) {
    this.free();
    return this.ask(this.next("stream", how));
  }

  /** What may come next in the running stream. Nothing waits for an answer.
   * @param {number[]} tokens @param {number[]} parents @param {number[]} neg_log_probs @param {boolean | null} waits */
  foresee(tokens, parents, neg_log_probs, waits) {
    const stream = this.streaming;
    if (!stream || tokens[0] !== this.log[this.base]) {
      throw new ProtocolError("guesses need a running stream, and begin at the log's end");
    }
    const { id: session, base } = this;
    return message("foresee", { session, round: stream.round, base, tokens, parents, neg_log_probs, waits });
  }

  /** Stop the running round, if any; its answer still comes. */
  cancel() {
    const running = this.unsettled.find((request) => ASKS.includes(request.kind));
    return running ? message("cancel", { session: this.id, round: running.round }) : null;
  }

  /** What to send first on a new connection. */
  recover() {
    if (!this.settled) return [...this.unsettled];
    this.resuming = true;
    return [
      message("resume", {
        session: this.id,
        length: this.settled,
        chain: chainHash(this.log.slice(0, this.settled)),
        round: this.round,
        epoch: this.epoch,
        records: this.records,
        held: [...this.held],
      }),
    ];
  }

  // ---- what an answer means

  /** Take in a message of this session. @param {Message} answer @returns {SessionEvent | null} */
  receive(answer) {
    switch (answer.kind) {
      case "opened":
        return this.ready(answer);
      case "verdict":
        return this.verdict(answer);
      case "stream_tokens":
        return this.streamed(answer);
      case "progress":
        return this.asked(answer.round) ? { kind: "working", done: answer.done, total: answer.total } : null;
      case "activations":
        this.held.add(answer.start, answer.start + answer.rows);
        this.epoch = Math.max(this.epoch, answer.epoch);
        return null;
      case "resumed":
        return this.resumed(answer);
      case "error":
        return this.refused(answer);
      default:
        throw new ProtocolError(`a session does not take ${answer.kind}`);
    }
  }

  /** @param {Message} answer */
  ready(answer) {
    const request = this.unsettled.find((asked) => asked.kind === "open" || asked.kind === "append");
    if (!request) return null;
    if (this.log.length < answer.length) {
      throw new ProtocolError(`the server's log has ${answer.length} tokens, ours ${this.log.length}`);
    }
    if (answer.length !== (request.base ?? 0) + request.ids.length) return null; // of an earlier opening, once more
    this.unsettled.splice(this.unsettled.indexOf(request), 1);
    this.settled = answer.length;
    this.epoch = answer.epoch;
    return { kind: "ready" };
  }

  /** @param {Message} answer */
  verdict(answer) {
    const request = this.asked(answer.round);
    if (request?.kind !== "verify") return null;
    const path = /** @type {number[]} */ (answer.path);
    const { tokens } = request;
    const parents = request.parents.length ? request.parents : tokens.map((/** @type {any} */ _, /** @type {number} */ i) => i - 1);
    const linked = path.every((node, i) => !i || (node > 0 && node < parents.length && parents[node] === path[i - 1]));
    if (answer.base !== request.base || path[0] !== 0 || !linked) {
      throw new ProtocolError(`the verdict of round ${answer.round} does not fit its draft`);
    }
    const won = [...path.slice(1).map((node) => tokens[node]), answer.next_token];
    return this.advance(request, answer, won, path, true);
  }

  /** @param {Message} answer */
  streamed(answer) {
    const request = this.asked(answer.round);
    if (request?.kind !== "stream") return null;
    const known = this.base - answer.base;
    if (known < 0) throw new ProtocolError(`stream tokens at ${answer.base + 1}, but the log ends at ${this.base}`);
    this.agree(answer.base + 1, answer.tokens.slice(0, known));
    return this.advance(request, answer, answer.tokens.slice(known), [], answer.done);
  }

  /** @param {Message} request @param {Message} answer @param {number[]} tokens @param {number[]} path @param {boolean} done */
  advance(request, answer, tokens, path, done) {
    this.check(tokens, this.log.length + tokens.length);
    const base = this.base;
    this.log.push(...tokens);
    this.settled = this.log.length;
    this.finish = answer.finish;
    if (done) {
      // The server has answered a later request, so the earlier ones are settled too.
      this.unsettled = [];
      this.round = request.round;
    }
    const { queue_ms, forward_ms, drafted = 0, foreseen = 0 } = answer;
    return { kind: "advanced", base, tokens, path, done, queue_ms, forward_ms, drafted, foreseen };
  }

  /** @param {Message} answer */
  resumed(answer) {
    if (!this.resuming) return null;
    this.resuming = false;
    if (answer.outcome === "gone") return this.gone();
    const { tail, length } = answer;
    if (length !== this.settled + tail.length) {
      throw new ProtocolError("the tail of a resumed session does not reach its length");
    }
    this.check(tail, length);
    const waiting = [];
    let base = this.settled - 1;
    let log = [...this.log.slice(0, this.settled), ...tail];
    for (const request of this.unsettled) {
      if (request.kind === "append") {
        if (length > request.base) {
          this.agree(request.base, tail.slice(0, request.ids.length));
          base += request.ids.length; // a prompt is no output
        } else {
          log = [...log, ...request.ids];
          waiting.push(request);
        }
      } else if (ASKS.includes(request.kind) && answer.round < request.round) waiting.push(request);
    }
    const tokens = log.slice(base + 1, length);
    this.log = log;
    this.settled = length;
    this.unsettled = waiting;
    this.round = answer.round;
    if (tail.length) this.finish = answer.finish; // else ours: a server that got the log again does not know the end
    const resend = waiting.filter((asked) => !(ASKS.includes(asked.kind) && asked.round === answer.running));
    this.epoch = answer.epoch;
    return { kind: "recovered", outcome: answer.outcome, tokens, resend };
  }

  gone() {
    const opening = this.opened(this.log.slice(0, this.settled || this.log.length));
    // A stream that has brought tokens goes on behind them: the other verifier gets them with the opening.
    const rounds = this.unsettled.filter((asked) => asked.kind !== "open");
    this.unsettled = [opening, ...rounds.map((asked) => (asked.kind === "stream" ? { ...asked, base: this.base } : asked))];
    return { kind: "recovered", outcome: "gone", tokens: [], resend: [...this.unsettled] };
  }

  /** @param {Message} error */
  refused(error) {
    if (error.code === "unknown_session" || error.code === "quarantined") return this.gone();
    // Only a round can be cancelled: an opening, or the ids of a turn, must not be forgotten for it.
    const retry = RETRYABLE.has(error.code) || (error.code === "cancelled" && !error.round);
    if (!retry) this.unsettled = this.unsettled.filter((asked) => error.round && roundIn(asked) !== error.round);
    return { kind: "refused", retry };
  }

  // ---- helpers

  /** Check that the server repeats our own tokens from `start` on. @param {number} start @param {number[]} tokens */
  agree(start, tokens) {
    if (!same(this.log.slice(start, start + tokens.length), tokens)) {
      throw new ProtocolError(`the server's tokens from position ${start} on differ from ours`);
    }
  }

  /** Check that an answer has only ids of the vocabulary, and no more than asked for. @param {number[]} tokens @param {number} length */
  check(tokens, length) {
    const most = tokens.reduce((a, b) => Math.max(a, b), 0);
    if (most >= this.vocabSize) throw new ProtocolError(`token id ${most} of a vocabulary of ${this.vocabSize}`);
    if (length - this.turnStart > this.maxNewTokens) {
      throw new ProtocolError(`more than the ${this.maxNewTokens} tokens that were asked for`);
    }
  }

  /** @param {number[]} ids */
  opened(ids) {
    return message("open", {
      session: this.id,
      ids: [...ids],
      max_new_tokens: this.maxNewTokens,
      sampling: this.sampling,
      stop: this.stop,
      ignore_eos: this.ignoreEos,
      generated: Math.max(0, ids.length - this.turnStart),
      round: this.round,
      records: this.records,
      held: [...this.held],
    });
  }

  /** @param {string} kind @param {Record<string, any>} fields */
  next(kind, fields) {
    return message(kind, { session: this.id, round: this.round + 1, base: this.base, ...fields });
  }

  /** @param {Message} request */
  ask(request) {
    this.unsettled.push(request);
    return request;
  }

  free() {
    if (this.busy) throw new ProtocolError("a round is under way: wait for its answer, or cancel it");
  }
}

/** @param {Message} request */
function roundIn(request) {
  return ASKS.includes(request.kind) ? request.round : 0;
}
