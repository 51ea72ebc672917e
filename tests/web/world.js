// A world in virtual time for the browser's half: a clock, an endpoint that may be gone, silent,
// busy or new, and a writer.

import { Answering } from "../../edge_client/web/turn/answering.js";
import { Endpoint } from "../../edge_client/web/turn/endpoint.js";
import { Turn } from "../../edge_client/web/turn/turn.js";
import { NoWriter } from "../../edge_client/web/turn/writer.js";

class Clock {
  now = 0;
  timers = [];

  setTimeout = (call, ms) => {
    const timer = { call, at: this.now + ms / 1000 };
    this.timers.push(timer);
    return timer;
  };

  clearTimeout = (timer) => {
    this.timers = this.timers.filter((other) => other !== timer);
  };

  sleep(seconds) {
    return new Promise((resolve) => {
      this.setTimeout(resolve, 1000 * seconds);
    });
  }

  async pass(until) {
    for (;;) {
      await quiet();
      this.timers.sort((a, b) => a.at - b.at);
      if (!this.timers.length || this.timers[0].at > until) break;
      const timer = this.timers.shift();
      this.now = Math.max(this.now, timer.at);
      timer.call();
    }
    this.now = until;
  }
}

// Everything that follows from what has happened.
const quiet = async () => {
  for (let at = 0; at < 4; at++) await new Promise(setImmediate);
};

class Server {
  up = true;
  silent = false;
  refuses = 0; // a status for whatever is asked
  odd = null; // what comes instead of the sixth frame of a stream, each time
  asked = [];
  streams = new Map(); // id -> { text, at } of those that it keeps

  constructor(clock, text, { pace = 0.05, piece = 2, reading = 0, mute = false }) {
    Object.assign(this, { clock, text: [...text], pace, piece, reading, mute });
  }

  restart() {
    this.streams.clear();
  }

  // What a stream has by now.
  frames(id) {
    const { began } = this.streams.get(id);
    const frames = [];
    const seconds = this.clock.now - began;
    for (let at = 0.5; at <= Math.min(this.reading, seconds); at += 0.5) {
      const read = this.mute ? 0 : at; // many engines do not tell how far they are
      frames.push({ moa: { reading: [read, this.reading] } });
    }
    const pieces = Math.floor((seconds - this.reading) / this.pace + 1e-9);
    for (let at = 0; at < pieces && at * this.piece < this.text.length; at++) {
      const end = Math.min(this.text.length, (at + 1) * this.piece);
      const content = this.text.slice(at * this.piece, end).join("");
      const moa = { verified: end };
      frames.push({ choices: [{ delta: { content }, moa }] });
      if (end === this.text.length) {
        frames.push(
          {
            choices: [
              { delta: {}, finish_reason: "stop", moa: { reason: "eos", all_verified: true } },
            ],
          },
          { choices: [], usage: { completion_tokens: 1 } },
          "[DONE]",
        );
      }
    }
    return frames;
  }

  fetch = async (address, how = {}) => {
    const path = address.replace("http://e", "");
    this.asked.push([
      this.clock.now,
      how.method ?? "GET",
      path,
      how.body ? JSON.parse(how.body) : null,
    ]);
    await this.clock.sleep(0.02);
    await this.#while(how.signal, () => this.silent);
    if (!this.up) throw new TypeError("fetch failed");
    if (this.refuses) {
      return {
        ok: false,
        status: this.refuses,
        headers: new Headers(),
        json: async () => ({ error: { message: "no" } }),
      };
    }
    const ok = (more) => ({
      ...more,
      ok: true,
      status: 200,
      headers: new Headers(more.headers),
      json: async () => more.json,
    });
    if (how.method === "DELETE") {
      this.streams.delete(path.split("/").at(-1));
      return { ...ok({}), status: 204 };
    }
    if (how.method === "POST") {
      const id = `s${this.asked.length}`;
      this.streams.set(id, { began: this.clock.now });
      return ok({ headers: { "X-Request-Id": id }, id, after: 0, signal: how.signal });
    }
    if (!path.startsWith("/v1/streams/")) return ok({ json: { data: [{ id: "m" }] } });
    const id = path.split("/").at(-1);
    if (!this.streams.has(id)) {
      return { ok: false, status: 404, headers: new Headers(), json: async () => ({}) };
    }
    return ok({
      headers: { "X-Request-Id": id },
      id,
      after: Number(how.headers["Last-Event-ID"] ?? 0),
      signal: how.signal,
    });
  };

  async *events({ id, after, signal }, heard) {
    let heartbeat = this.clock.now;
    for (;;) {
      await this.#while(signal, () => this.silent);
      if (!this.up || !this.streams.has(id)) throw new TypeError("network error");
      const frames = this.frames(id);
      for (; after < frames.length; after++) {
        heard(10);
        heartbeat = this.clock.now;
        if (after === 5 && this.odd !== null) yield { id: "", data: this.odd };
        const frame = frames[after];
        yield {
          id: String(after + 1),
          data: typeof frame === "string" ? frame : JSON.stringify(frame),
        };
        if (frame === "[DONE]") return;
      }
      if (this.clock.now >= heartbeat + 1) {
        heard(2);
        heartbeat = this.clock.now;
      }
      await this.#pause(signal, 0.01);
    }
  }

  async #while(signal, holds) {
    do {
      if (signal?.aborted) throw Object.assign(new Error("aborted"), { name: "AbortError" });
      if (holds()) await this.#pause(signal, 0.01);
    } while (holds());
  }

  async #pause(signal, seconds) {
    await this.clock.sleep(seconds);
    if (signal?.aborted) throw Object.assign(new Error("aborted"), { name: "AbortError" });
  }
}

// Writes the text, but for some of its characters.
class Oracle {
  prompt = [1, 2, 3];
  notice = "";
  guard = { warning: () => "" };
  ids = [];

  constructor(clock, text, wrong, most) {
    Object.assign(this, { clock, text: [...text], wrong: new Set(wrong), most });
  }

  tokens(text) {
    return [...text].length;
  }

  be(before, ids) {
    this.at = [...before].length + ids.length;
  }

  mayWrite(unseen) {
    return unseen.length < this.most;
  }

  async next(breathe, wanted) {
    await this.clock.sleep(0.01);
    if (!wanted()) return null;
    const { at } = this;
    const last = at >= this.text.length - 1;
    return {
      id: at,
      piece: this.wrong.has(at) ? "#" : (this.text[at] ?? ""),
      finish: last ? "eos" : "",
    };
  }

  close() {}
}

// `ask.structured`: the answer has a form that only the endpoint follows.
function writerOf(clock, ask) {
  return ask.structured
    ? new NoWriter()
    : new Oracle(clock, ask.text, ask.wrong ?? [], ask.most ?? 1000);
}

// Plays `ask.script`, a list of [time, verb, value]; returns what the page was told, when, and what
// the endpoint was asked.
export async function play(ask) {
  const clock = new Clock();
  const told = [];
  const statuses = [];
  const server = new Server(clock, ask.text, ask);
  const environment = {
    fetch: server.fetch,
    events: (response, heard) => server.events(response, heard),
    now: () => clock.now,
    random: () => 0.5,
    setTimeout: clock.setTimeout,
    clearTimeout: clock.clearTimeout,
    breathe: async () => {},
  };
  Object.assign(server, ask.at_first);
  const endpoint = ask.alone ? null : new Endpoint("http://e", environment);
  let answering = null;
  let over = null;
  const begin = (state, writes = true) => {
    const turn = new Turn(state);
    const mine = [];
    if (state) told.push([clock.now, { kill: true }], [clock.now, turn.replay()]);
    if (!writes) turn.end = null;
    const emit = (chunk) => {
      if (answering === mine[0]) told.push([clock.now, structuredClone(chunk)]);
    };
    answering = new Answering({
      turn,
      body: { messages: [] },
      endpoint,
      environment,
      settle: ask.settle ?? 1,
      emit,
      writer: writes ? writerOf(clock, ask) : null,
    });
    mine[0] = answering;
    over = null;
    const one = answering;
    one.run().then(
      () => {
        if (one === answering) over = clock.now;
      },
      (error) => {
        if (one === answering) over = `${error.status} ${error.message}`;
      },
    );
  };
  begin(null);
  for (const [at, verb, value] of ask.script) {
    await clock.pass(at);
    if (verb === "kill") {
      const state = structuredClone(answering.turn.kept());
      const old = answering;
      answering = null;
      old.over.abort("left");
      old.attempt.abort("left");
      await quiet();
      begin(state);
    } else if (verb === "check") {
      // as the page does once it is told that the endpoint is there
      endpoint.look().catch(() => {});
      await clock.pass(clock.now + 0.1);
      if (over && !answering.turn.end?.choices[0].moa.all_verified) {
        begin(structuredClone(answering.turn.kept()), false);
      }
    } else if (verb === "stop") {
      answering.stop();
    } else if (verb === "restart") {
      server.restart();
    } else if (verb === "cut") {
      endpoint.cutOff(value);
    } else if (verb === "status") {
      const { link, rtt_ms } = endpoint.status();
      statuses.push([link, rtt_ms]);
    } else if (verb === "token") {
      endpoint.useToken(value);
    } else {
      server[verb] = value;
    }
    await quiet();
  }
  await clock.pass(ask.until);
  return {
    told,
    statuses,
    over,
    asked: server.asked,
    text: answering.turn.text,
    verified: answering.turn.verified,
  };
}
