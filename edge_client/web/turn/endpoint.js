// The endpoint that the page asks while there is a network: its state, and requests to it. Over
// fetch, with OpenAI's API (docs/serve.md), so that whatever carries a page carries this.

import { safeLine } from "./safe.js";
import { waits } from "./pacing.js";

/** What a browser (or a test) gives; `events` are those of a response
 * (edge_client/serve/page/events.js).
 * @typedef {{fetch: typeof fetch, events: (response: Response, heard: (size: number) => void) =>
 * AsyncIterable<any>, now: () => number, random: () => number, setTimeout: (call: () => void, ms:
 * number) => any, clearTimeout: (timer: any) => void, breathe: () => Promise<void>}} Environment */
/** @typedef {"connecting" | "online" | "offline" | "locked" | "refused"} State */

const FIRST_PAUSE = 0.25;
const LONGEST_PAUSE = 5;
const LONGEST_ASKED = 300;
const LONGEST_ANSWER = 10;
const STATUS_SECONDS = 5;
const RTT_WEIGHT = 0.3;

/** The endpoint answers with an error. */
export class Refusal extends Error {
  /** @param {number} status @param {any} body @param {number} retryAfter */
  constructor(status, body, retryAfter = 0) {
    super(safeLine(String(body?.error?.message ?? `the endpoint answered ${status}`)));
    this.status = status;
    this.code = String(body?.error?.code ?? "");
    this.retryAfter = retryAfter;
  }

  /** Whether the same request may succeed later. */
  get passes() {
    return this.status === 429 || this.status >= 500;
  }
}

/** The reason of an abort that is no failure: the answer is stopped, or the network is left on
 * purpose. */
export const LEFT = "left";

export class Endpoint {
  /** @param {string} address @param {Environment} environment */
  constructor(address, environment) {
    this.address = address.replace(/\/$/, "");
    this.environment = environment;
    this.token = "";
    /** @type {State} */
    this.state = "connecting";
    this.detail = "";
    /** Disconnected on purpose. */
    this.cut = false;
    this.failures = 0;
    this.notBefore = 0;
    this.downSince = environment.now();
    this.askedAt = -Infinity;
    /** Milliseconds of a short request, and bytes. @type {number | null} */
    this.rtt = null;
    this.sentBytes = this.receivedBytes = 0;
    /** What it says about itself. @type {any} */
    this.about = {};
    this.looking = false;
    /** When anything arrived, or the first of the requests under way was made. */
    this.signAt = -Infinity;
    /** @type {Set<() => void>} */
    this.bells = new Set();
    /** @type {Set<AbortController>} */
    this.running = new Set();
  }

  // ---- its state

  /** Cut it off on purpose, or connect it again. @param {boolean} cut */
  cutOff(cut) {
    this.cut = cut;
    if (cut) {
      this.#down("cut off on purpose");
      for (const running of [...this.running]) running.abort(LEFT);
    } else {
      this.networkChanged();
    }
  }

  /** Another network, or the page is seen again: try at once. */
  networkChanged() {
    this.failures = this.notBefore = 0;
    if (!this.cut && ["locked", "refused"].includes(this.state)) this.state = "connecting";
    this.askedAt = -Infinity;
    this.#ring();
  }

  /** @param {string} token */
  useToken(token) {
    if (token === this.token) return;
    this.token = token;
    this.networkChanged();
  }

  /** Seconds until it may be asked again; null: not before the user does something. */
  pause() {
    if (this.cut || this.state === "locked" || this.state === "refused") return null;
    return Math.max(0, this.notBefore - this.environment.now());
  }

  /** Until `pause` may have changed, at most so many seconds.
   * @param {number | null} seconds
   * @param {AbortSignal} signal */
  changed(seconds, signal) {
    const { setTimeout, clearTimeout } = this.environment;
    return new Promise((/** @type {(value?: any) => void} */ resolve) => {
      if (signal.aborted) return resolve();
      const over = () => {
        clearTimeout(timer);
        this.bells.delete(over);
        signal.removeEventListener("abort", over);
        resolve();
      };
      const timer = seconds === null ? undefined : setTimeout(over, 1000 * seconds);
      this.bells.add(over);
      signal.addEventListener("abort", over);
    });
  }

  /** Of a round trip, as far as it is known. */
  get rttSeconds() {
    return (this.rtt ?? 0) / 1000;
  }

  /** Seconds without a sign after which it is late. */
  get silent() {
    return waits(this.rttSeconds, 0).silent;
  }

  /** Its figures for the page; asked for again when they are old, in the background. */
  status() {
    const { environment, state, detail, rtt, sentBytes, receivedBytes, about } = this;
    const age = environment.now() - this.askedAt;
    if (age > STATUS_SECONDS || (state !== "online" && this.pause() === 0 && age > FIRST_PAUSE)) {
      this.look().catch(() => {});
    }
    const late =
      state === "online" && this.running.size > 0 && environment.now() - this.signAt > this.silent;
    return {
      link: late ? "late" : state,
      detail,
      rtt_ms: state === "online" ? rtt : null,
      sent_bytes: sentBytes,
      received_bytes: receivedBytes,
      about,
    };
  }

  /** Ask for its state, and whose text it is. */
  async look() {
    if (this.cut || this.looking) return;
    this.looking = true;
    this.askedAt = this.environment.now();
    try {
      const began = this.environment.now();
      const status = await this.json("/moa/status");
      const rtt = 1000 * (this.environment.now() - began);
      const lasted = rtt > 1000 * this.silent; // that was an outage, no round trip
      if (!lasted) this.rtt = this.rtt === null ? rtt : this.rtt + RTT_WEIGHT * (rtt - this.rtt);
      const model = this.about.model ?? (await this.json("/v1/models")).data[0].id;
      this.about = {
        model,
        verifier: status.verifier,
        verifier_version: status.verifier_version,
        context: status.context,
      };
    } finally {
      this.looking = false;
    }
  }

  // ---- requests

  /** What it answers to a short request. @param {string} path @param {any} how */
  async json(path, how = {}) {
    const abort = new AbortController();
    const timer = this.environment.setTimeout(() => abort.abort(), 1000 * LONGEST_ANSWER);
    this.running.add(abort);
    try {
      const response = await this.#response(path, how, abort);
      const answer = response.status === 204 ? null : await response.json();
      this.progressed();
      return answer;
    } catch (error) {
      throw this.#failed(error, abort);
    } finally {
      this.environment.clearTimeout(timer);
      this.running.delete(abort);
    }
  }

  /** The events of a stream; `opened` is given the response's id, and `heard` is called whenever
   * anything arrives.
   * @param {string} path
   * @param {any} how
   * @param {AbortController} abort
   * @param {{opened: (id: string) => void, heard: () => void}} tell */
  async *stream(path, how, abort, { opened, heard }) {
    this.running.add(abort);
    try {
      const response = await this.#response(path, how, abort);
      heard();
      opened(response.headers.get("X-Request-Id") ?? "");
      const told = (/** @type {number} */ size) => {
        this.receivedBytes += size;
        this.signAt = this.environment.now();
        heard();
      };
      for await (const event of this.environment.events(response, told)) yield event;
    } catch (error) {
      throw this.#failed(error, abort);
    } finally {
      this.running.delete(abort);
      abort.abort(LEFT); // also of a body that is not read to its end
    }
  }

  /** @param {string} path @param {any} how @param {AbortController} abort */
  async #response(path, { headers = {}, ...how }, abort) {
    if (this.cut) abort.abort(LEFT);
    if (this.running.size === 1) this.signAt = this.environment.now();
    const given = this.token ? { Authorization: `Bearer ${this.token}`, ...headers } : headers;
    const { fetch } = this.environment;
    const response = await fetch(this.address + path, {
      ...how,
      headers: given,
      signal: abort.signal,
      cache: "no-store",
    });
    this.signAt = this.environment.now();
    this.sentBytes += path.length + (how.body?.length ?? 0);
    if (!response.ok) throw await refusal(response);
    this.#up();
    return response;
  }

  /** A request failed: what it was. @param {any} error @param {AbortController} abort */
  #failed(error, abort) {
    if (abort.signal.reason === LEFT) return Object.assign(new Error(LEFT), { left: true });
    if (!(error instanceof Refusal)) {
      this.postpone(0);
      this.#down("the endpoint does not answer");
    } else if (error.status === 401 || error.status === 403) {
      this.#down(error.message, error.status === 401 ? "locked" : "refused");
    } else {
      this.#up();
      if (error.passes) this.postpone(error.retryAfter);
    }
    return error;
  }

  /** Ask again later: in the pause that was asked for, or one that grows.
   * @param {number} asked seconds */
  postpone(asked) {
    const { now, random } = this.environment;
    const pause =
      Math.min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** Math.min(this.failures++, 10)) *
      (0.5 + 0.5 * random());
    this.notBefore = now() + Math.max(pause, Math.min(asked, LONGEST_ASKED));
  }

  /** It brought text: the next failure is the first again. */
  progressed() {
    this.failures = 0;
  }

  #up() {
    this.notBefore = 0;
    if (this.state === "online") return;
    this.state = "online";
    this.detail = "";
    this.#ring();
  }

  /** @param {string} why @param {State} state */
  #down(why, state = "offline") {
    if (this.state === "online" || this.state === "connecting") {
      this.downSince = this.environment.now();
    }
    this.state = state;
    this.detail = why;
    this.#ring();
  }

  #ring() {
    for (const bell of [...this.bells]) bell();
  }
}

/** @param {Response} response */
async function refusal(response) {
  const body = await response.json().catch(() => null);
  return new Refusal(response.status, body, Number(response.headers.get("Retry-After")) || 0);
}
