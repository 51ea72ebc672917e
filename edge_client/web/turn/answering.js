// One answer from its request to its end: the endpoint's stream is followed wherever there is one,
// and this device writes while the endpoint does not answer.

import { LEFT, Refusal } from "./endpoint.js";
import { checked } from "./turn.js";
import { Waiting } from "./waiting.js";

/** @typedef {import("./turn.js").Turn} Turn */
/** @typedef {import("./endpoint.js").Endpoint} Endpoint */
/** @typedef {import("./endpoint.js").Environment} Environment */
/** @typedef {import("./writer.js").Writer} Writer */
/** `writer`: null where only the check is wanted. `settle`: seconds to wait for a lost endpoint at
 * the end. `lost`: why a check ends without one.
 * @typedef {{turn: Turn, body: any, endpoint: Endpoint | null, writer: Writer | null, environment:
 * Environment, settle: number, lost?: string, emit: (chunk: any) => void}} How */

export class Answering {
  /** @param {How} how */
  constructor({ turn, body, endpoint, writer, environment, settle, lost = "link", emit }) {
    this.turn = turn;
    this.body = body;
    this.endpoint = endpoint;
    this.writer = writer;
    this.environment = environment;
    this.settle = settle;
    this.lost = lost;
    this.emit = emit;
    const { now } = environment;
    const down = !endpoint || endpoint.state === "offline" || endpoint.cut;
    this.waiting = new Waiting(now(), down ? (endpoint?.downSince ?? -Infinity) : null);
    /** Since when nothing more can be written here. @type {number | null} */
    this.blockedSince = null;
    this.over = new AbortController();
    this.stopped = false;
    /** Whether the drafter has failed. */
    this.broken = false;
    /** @type {any} */
    this.error = null;
    this.told = "";
    this.saidWhy = false;
    /** The most characters that the endpoint's text has had. */
    this.furthest = 0;
    /** Tokens of the prompt that it has read. */
    this.read = 0;
    /** Ends the request under way. */
    this.attempt = new AbortController();
    /** @type {Set<() => void>} */
    this.bells = new Set();
  }

  /** Until its end. */
  async run() {
    const work = [this.#watch()];
    if (this.endpoint && !this.turn.refused) work.push(this.#follow(this.endpoint));
    if (this.writer) work.push(this.#write(this.writer).catch((error) => this.#alone(error)));
    try {
      await Promise.all(work.map((one) => one.catch((error) => this.#fail(error))));
    } finally {
      this.writer?.close();
    }
    if (this.error) throw this.error;
  }

  /** The reader wants no more of it. */
  stop() {
    this.stopped = true;
    const { endpoint, turn } = this;
    if (endpoint && turn.stream) {
      endpoint
        .json(`/v1/streams/${turn.stream}`, { method: "DELETE", keepalive: true })
        .catch(() => {});
    }
    this.#end("cancelled");
  }

  /** @param {string} reason */
  #end(reason) {
    if (this.over.signal.aborted) return;
    if (!this.turn.end) this.emit(this.turn.leaves(reason, this.#usage()));
    this.#finish();
  }

  #finish() {
    this.over.abort(LEFT);
    this.attempt.abort(LEFT);
    this.#ring();
  }

  /** @param {any} error */
  #fail(error) {
    this.error ??= error;
    this.#finish();
  }

  #usage() {
    const { turn, writer } = this;
    if (!writer) return undefined;
    const tokens = turn.alone?.begin === 0 ? turn.alone.ids.length : writer.tokens(turn.text);
    return { completion_tokens: tokens, total_tokens: writer.prompt.length + tokens, moa: {} };
  }

  // ---- the endpoint

  /** @param {Endpoint} endpoint */
  async #follow(endpoint) {
    const { now } = this.environment;
    while (!this.over.signal.aborted) {
      const pause = endpoint.pause();
      if (pause !== 0) {
        if (endpoint.state !== "online") this.#lost(endpoint);
        await endpoint.changed(pause, this.over.signal);
        continue;
      }
      this.attempt = new AbortController();
      if (this.waiting.downSince === null) this.waiting.asked(now());
      try {
        if (await this.#read(endpoint)) return this.#finish();
      } catch (error) {
        if (this.over.signal.aborted) return;
        if (!this.#goesOn(/** @type {any} */ (error))) return;
      }
    }
  }

  /** Read the stream for as long as it comes; whether the answer has ended.
   * @param {Endpoint} endpoint */
  async #read(endpoint) {
    const {
      turn,
      environment: { now },
    } = this;
    const tell = {
      opened: (/** @type {string} */ id) => {
        if (!turn.stream) turn.begins(id);
        this.waiting.rtt = endpoint.rttSeconds;
        this.waiting.asked(now());
        this.#say("online");
        this.#ring();
      },
      heard: () => {
        this.waiting.heard(now());
        this.#ring();
      },
    };
    for await (const { id, data } of endpoint.stream(...this.#request(), this.attempt, tell)) {
      if (data === "[DONE]") break;
      const chunk = this.#parsed(data);
      if (chunk.error) throw this.#brokenOff(chunk);
      this.#take(chunk);
      turn.seen = id || turn.seen;
      if (this.over.signal.aborted) return true;
    }
    if (turn.end) return true;
    throw this.#brokenOff({ error: { message: "the endpoint ended the answer in its middle" } });
  }

  /** What an event says; an endpoint that says anything else is not followed.
   * @param {string} data */
  #parsed(data) {
    try {
      return checked(JSON.parse(data));
    } catch {
      const message = "the endpoint sent what is no part of an answer";
      throw new Refusal(400, { error: { message } });
    }
  }

  /** The stream ended without an end. @param {any} body */
  #brokenOff(body) {
    this.endpoint?.postpone(0);
    return new Refusal(503, body);
  }

  /** @returns {[string, any]} */
  #request() {
    const { turn, body } = this;
    if (turn.stream) {
      return [
        `/v1/streams/${turn.stream}`,
        { headers: turn.seen ? { "Last-Event-ID": turn.seen } : {} },
      ];
    }
    const written = turn.text;
    const asked = {
      ...body,
      ...(written && { prediction: { type: "content", content: written } }),
    };
    return [
      "/v1/chat/completions",
      {
        method: "POST",
        body: JSON.stringify(asked),
        headers: { "Content-Type": "application/json" },
      },
    ];
  }

  /** @param {any} chunk */
  #take(chunk) {
    const {
      turn,
      environment: { now },
    } = this;
    const before = turn.theirs.length;
    const told = turn.take(chunk);
    const text = turn.theirs.length !== before;
    const read = chunk.moa?.reading?.[0] ?? this.read;
    // One that has not come further says so again, as a sign of life.
    if (text || read !== this.read) this.waiting.progressed(now(), text);
    this.read = read;
    if (text) this.#say("online");
    // What it says again after each failure is no progress.
    if (turn.theirs.length > this.furthest) {
      this.furthest = turn.theirs.length;
      this.endpoint?.progressed();
    }
    this.blockedSince = this.broken ? now() : null;
    if (told) this.emit(told);
    this.#ring();
  }

  /** What a failure means; whether the endpoint is asked again. @param {any} error */
  #goesOn(error) {
    const { turn, endpoint } = this;
    if (error instanceof Refusal) {
      if (error.status === 404 && turn.stream) turn.forget();
      else if (error.passes) turn.forget();
      else if (error.status !== 401 && error.status !== 403) return this.#refuse(error);
    }
    if (endpoint?.state !== "online") this.#lost(/** @type {Endpoint} */ (endpoint));
    return true;
  }

  /** It refuses this answer for good: without a word of it, that is the answer.
   * @param {Refusal} error */
  #refuse(error) {
    const { turn } = this;
    turn.refused = error.message;
    if (!turn.shown.length) {
      this.#fail(error);
    } else {
      this.emit({ moa: { notice: `the verifier does not check this answer: ${error.message}` } });
      this.waiting.lost(this.environment.now());
      this.#ring();
    }
    return false;
  }

  /** @param {Endpoint} endpoint */
  #lost(endpoint) {
    this.waiting.lost(this.waiting.downSince ?? endpoint.downSince);
    this.#say(
      ["locked", "refused"].includes(endpoint.state) ? endpoint.state : "offline",
      endpoint.detail,
    );
    this.#ring();
  }

  /** @param {string} state @param {string} detail */
  #say(state, detail = "") {
    if (this.told === state) return;
    this.told = state;
    this.emit({ moa: { link: state, detail } });
  }

  // ---- this device

  /** Writes wherever the endpoint does not, until the answer is over. @param {Writer} writer */
  async #write(writer) {
    const { turn, waiting } = this;
    const { now } = this.environment;
    if (writer.notice && !this.endpoint) this.emit({ moa: { notice: writer.notice } });
    while (!this.over.signal.aborted) {
      if (turn.finish || this.#blocked(writer)) {
        this.#block();
        await this.#change(null);
        continue;
      }
      const at = waiting.writeAt();
      const prepares = waiting.downSince !== null;
      if (at > now() && !prepares) {
        await this.#change(at - now());
        continue;
      }
      if (!this.#mayWrite(writer)) {
        this.#sayWhy(writer);
        this.#block();
        continue;
      }
      await this.#writeToken(writer);
    }
  }

  /** Makes the next token, and shows it when it is time, if it still follows what is there then.
   * @param {Writer} writer */
  async #writeToken(writer) {
    const { turn, waiting } = this;
    const { now, breathe } = this.environment;
    const here = turn.here();
    const { alone } = turn;
    const length = here.ids.length;
    const isWanted = () => {
      const isSameText = turn.alone === alone && here.ids.length === length;
      return isSameText && !turn.end && !this.over.signal.aborted;
    };
    const made = await writer.next(breathe, isWanted);
    while (made && isWanted() && waiting.writeAt() > now()) {
      await this.#change(waiting.writeAt() - now());
    }
    if (!made || !isWanted()) return;
    if (waiting.downSince === null) this.#say("late");
    this.emit(turn.wrote(made.id, made.piece, made.finish));
    waiting.wrote(now());
    if (made.finish) this.#block();
    const warning = writer.guard.warning(turn.unseen.length);
    if (warning) this.emit({ moa: { notice: warning } });
  }

  /** What the user is to know of a device that must not write. @param {any} writer */
  #sayWhy(writer) {
    if (!writer.why || this.saidWhy) return;
    this.saidWhy = true;
    this.emit({ moa: { notice: writer.why } });
  }

  /** Nothing more can be written here, for now. */
  #block() {
    if (this.blockedSince !== null) return;
    this.blockedSince = this.environment.now();
    this.#ring();
  }

  /** @param {Writer} writer */
  #blocked(writer) {
    return this.blockedSince !== null && !this.#mayWrite(writer);
  }

  /** The drafter failed: without an endpoint nothing is left. @param {any} error */
  #alone(error) {
    if (!this.endpoint || this.turn.refused) throw error;
    this.emit({
      moa: {
        notice: `the drafter failed: ${error.message}. The verifier writes the rest of this answer`,
      },
    });
    this.broken = true;
    this.#block();
  }

  /** @param {Writer} writer */
  #mayWrite(writer) {
    const { before, ids } = this.turn.here();
    writer.be(before, ids);
    return writer.mayWrite(this.turn.unseen);
  }

  // ---- its end

  /** Gives up a silent connection, and an answer that can neither grow nor be checked. */
  async #watch() {
    const {
      turn,
      waiting,
      environment: { now },
    } = this;
    while (!this.over.signal.aborted) {
      let next = waiting.downSince === null ? waiting.giveUpAt() : Infinity;
      if (next <= now()) {
        this.attempt.abort();
        waiting.heard(now());
        continue;
      }
      if (!this.writer && waiting.downSince !== null) return this.#end(this.lost);
      if (!turn.end && this.blockedSince !== null) {
        const at = waiting.endAt(
          this.blockedSince,
          this.endpoint && !turn.refused ? this.settle : 0,
        );
        if (at !== null && at <= now()) {
          return this.#end(turn.finish || this.writer?.blockedReason || "guard");
        }
        next = Math.min(next, at ?? Infinity);
      }
      await this.#change(next === Infinity ? null : next - now());
    }
  }

  /** Until something has happened, at most so many seconds. @param {number | null} seconds */
  #change(seconds) {
    const { setTimeout, clearTimeout } = this.environment;
    return new Promise((/** @type {(value?: any) => void} */ resolve) => {
      if (this.over.signal.aborted) return resolve();
      /** @type {any} */
      let timer;
      const over = () => {
        clearTimeout(timer);
        this.bells.delete(over);
        resolve();
      };
      if (seconds !== null) timer = setTimeout(over, 1000 * Math.max(0, seconds));
      this.bells.add(over);
    });
  }

  #ring() {
    for (const bell of [...this.bells]) bell();
  }
}
