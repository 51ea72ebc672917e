// This device as the writer of an answer: its drafter, from the text so far on, token by token.

import { OfflineGuard } from "./guard.js";
import { finishAfter, TextStream } from "./text.js";
import { fitting, leftOutNotice, promptRoom } from "./window.js";

/** What a bundle is to a writer. `drafterFor` lends a drafter to who writes after these ids, until
 * `free`.
 * @typedef {{encode: (text: string) => number[], decode: (ids: number[]) => string, render:
 * (messages: any[]) => string, hasTemplate: boolean, eosIds: number[], maxPositions: number,
 * maxTokens: number, calibration: any, drafterFor: (ids: number[]) => any, free: (drafter: any) =>
 * void}} Device */

/** Whether an answer has a form that only the verifier follows: this device has no grammars.
 * @param {any} body */
export function needsVerifier(body) {
  const format = body.response_format?.type ?? "text";
  return Boolean(body.tools?.length) || format !== "text";
}

/** In the place of a writer where this device must not write: the answer waits for the verifier. */
export class NoWriter {
  notice = "";
  why = "only the verifier writes JSON by a schema and calls tools: the answer waits for it";
  blockedReason = "link";
  /** @type {number[]} */
  prompt = [];

  tokens() {
    return 0;
  }

  be() {}

  mayWrite() {
    return false;
  }

  next() {
    throw new Error("this device does not write here");
  }

  close() {}
}

export class Writer {
  /** Why an answer ends that may not grow, and nobody checks. */
  blockedReason = "guard";

  /** @param {Device} device @param {any} body of the request, as OpenAI's API has it */
  constructor(device, body) {
    this.device = device;
    this.body = body;
    this.guard = new OfflineGuard(device.calibration, device.decode);
    this.sampling = {
      temperature: body.temperature ?? 0,
      topP: body.top_p ?? 1,
      topK: body.top_k ?? 0,
      seed: body.seed ?? 0,
    };
    const room = device.hasTemplate
      ? promptRoom(device.maxPositions, body.max_tokens ?? 0)
      : Infinity;
    const { sent, ids, leftOut } = fitting(body.messages, room, (messages) =>
      device.encode(device.render(messages)),
    );
    this.sent = sent;
    this.prompt = ids;
    /** What the user is to know about the prompt. */
    this.notice = leftOut ? leftOutNotice(leftOut) : "";
    /** @type {number[]} */
    this.context = [];
    /** @type {any} */
    this.drafter = null;
    /** The text that this writer goes on after, and its own tokens. */
    this.before = "\0";
    /** @type {number[]} */
    this.ids = [];
    this.stream = new TextStream(device.decode);
  }

  get rules() {
    const { device, body, prompt } = this;
    const stop = [body.stop ?? []].flat();
    const maxNewTokens = body.max_tokens || device.maxTokens;
    return {
      start: prompt.length,
      maxNewTokens,
      maxContext: device.maxPositions,
      eosIds: new Set(device.eosIds),
      stop,
    };
  }

  /** How many tokens an answer has that reads so. @param {string} text */
  tokens(text) {
    return this.device.encode(text).length;
  }

  /** Be there: after the text of others, and these tokens of its own.
   * @param {string} before
   * @param {number[]} ids */
  be(before, ids) {
    const here =
      this.before === before &&
      this.ids.length === ids.length &&
      ids.every((id, at) => id === this.ids[at]);
    if (here) return;
    const { device } = this;
    this.before = before;
    this.ids = [...ids];
    const begun = before ? device.encode(device.render(this.sent) + before) : this.prompt;
    this.context = [...begun, ...ids];
    this.stream = new TextStream(device.decode, this.rules.stop);
    for (const id of this.context.slice(this.prompt.length)) this.stream.add(id);
  }

  /** Whether this text may grow. @param {number[]} unseen its end that no verifier has seen */
  mayWrite(unseen) {
    return !this.guard.stops(unseen) && this.context.length < this.device.maxPositions;
  }

  /** The next token where it is now, its text, and why the answer ends with it, "" if it goes on.
   * Between two steps of the drafter others have their turn.
   * @param {() => Promise<void>} breathe
   * @param {() => boolean} wanted
   * @returns {Promise<{id: number, piece: string, finish: string} | null>} null if it is no longer
   * wanted */
  async next(breathe, wanted) {
    const { context, device } = this;
    this.drafter ??= device.drafterFor(context);
    const steps = this.drafter.guess([...context], this.sampling);
    for (;;) {
      const { done, value } = await steps.next();
      await breathe();
      if (!wanted()) return null;
      if (!done) continue;
      if (!Number.isInteger(value) || value < 0) throw new Error(`${value} is no token`);
      const finish = finishAfter(this.rules, context, value, device.decode);
      this.context.push(value);
      this.ids.push(value);
      const piece = this.stream.add(value) + (finish ? this.stream.flush() : "");
      return { id: value, piece, finish };
    }
  }

  /** Give the drafter back. */
  close() {
    if (this.drafter) this.device.free(this.drafter);
    this.drafter = null;
  }
}
