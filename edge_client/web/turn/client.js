// What the page's worker uses: a client with one link, and conversations. As client.py, conversation.py,
// turn/shell.py and turn/worker.py of edge_client/.

import { Controller, GUESSED } from "./controller.js";
import { Deadlines, OfflineGuard, PATIENCE } from "./deadlines.js";
import { Mailbox, VerifierLink } from "./link.js";
import { TurnMachine } from "./machine.js";
import { Reachability, Retry, SessionState } from "./reach.js";
import { Records } from "./records.js";
import { ClientSession } from "./session.js";
import { Stats } from "./stats.js";
import { hex, same, unhex } from "./text.js";
import { Transcript } from "./transcript.js";

/** @typedef {typeof DEFAULTS} Settings */
/** @typedef {import("./machine.js").Action} Action */

/** The settings of a turn, as edge_client/settings.py explains them. */
export const DEFAULTS = {
  maxNewTokens: 256,
  temperature: 0,
  topK: 0,
  topP: 1,
  minP: 0,
  repetitionPenalty: 1,
  seed: 0,
  stop: /** @type {string[]} */ ([]),
  ignoreEos: false,
  draft: /** @type {import("./controller.js").WhoDrafts} */ ("auto"),
  guessAhead: true,
  sync: "auto",
  maxOfflineTokens: -1,
  offlineAfter: 1,
  settleSeconds: 5,
  answerSeconds: 120,
  connectSeconds: 10,
  reconnectSeconds: 5,
  keepaliveSeconds: 5,
};

/** Longest blocking of the event loop, in seconds, and new tokens above which a step runs a piece of a prompt. */
const BLOCKING = 0.005, PIECE = 16;
const IDS = 2 ** 31;

/** Let messages and timers have their turn. A timer would wait 4 ms. */
function breathe() {
  return new Promise((/** @type {(value?: any) => void} */ resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

/** @returns {import("./link.js").Environment} */
const browser = () => ({
  WebSocket: globalThis.WebSocket,
  now: () => performance.now() / 1000,
  setTimeout: (call, ms) => setTimeout(call, ms),
  clearTimeout: (timer) => clearTimeout(timer),
  random: Math.random,
  randomBytes: (size) => crypto.getRandomValues(new Uint8Array(size)),
  breathe,
});

/** One for a bundle and a verifier. */
export class EdgeClient {
  /** @param {{verifier: string, identities: Record<string, string>, device: any, environment?: any, settings?: any}} how */
  constructor({ verifier, identities, device, environment = {}, settings = {} }) {
    this.device = device;
    this.environment = { ...browser(), ...environment };
    this.settings = { ...DEFAULTS, ...settings };
    this.link = verifier ? new VerifierLink(verifier, identities, this.environment, this.settings) : null;
    this.controller = new Controller(this.link?.rtt);
    if (device.calibration) this.controller.calibrate(device.calibration.acceptance);
    /** Notices of welcomes that were passed on. @type {string[]} */
    this.told = [];
    this.timed = false;
  }

  open() {
    this.link?.open();
  }

  close() {
    this.link?.close();
  }

  /** @param {boolean} cut */
  cutOff(cut) {
    this.link?.cutOff(cut);
  }

  networkChanged() {
    this.link?.networkChanged();
  }

  /** A conversation, or one that was interrupted. @param {any} snapshot */
  conversation(snapshot = null) {
    return new Conversation(this, snapshot);
  }

  /** Most tokens of prompt and answer together. */
  get maxContext() {
    return Math.min(this.device.maxPositions, this.link?.welcome?.limits.max_context_tokens ?? Infinity);
  }

  /** The notices in the verifier's welcome, once. @returns {string[]} */
  news() {
    /** @type {string[]} */
    const notices = this.link?.welcome?.notices ?? [];
    const news = notices.filter((notice) => !this.told.includes(notice));
    this.told.push(...news);
    return news;
  }

  newId() {
    return this.environment.randomBytes(16);
  }

  /** Measure the drafter's steps before the first draft is planned. @param {any} drafter */
  async time(drafter) {
    if (this.timed) return;
    this.timed = true;
    const { now } = this.environment, tried = { breadth: 4, depth: 3, nodes: 12, minScore: -12, least: -Infinity };
    for (const books of [new Controller(), this.controller]) {
      // the first run allocates memory and is slow: it does not count
      const steps = drafter.draft([0], tried, samplingOf(DEFAULTS));
      for (let done = false; !done; ) {
        const start = now();
        done = (await steps.next()).done;
        books.step.observe(drafter.runTokens, now() - start);
      }
    }
  }
}

/** @param {Settings} settings */
function samplingOf({ temperature, topK, topP, minP, repetitionPenalty, seed }) {
  return { temperature, topK, topP, minP, repetitionPenalty, seed };
}

/** @param {Settings} settings */
function wireSampling({ temperature, topK, topP, minP, repetitionPenalty, seed }) {
  return { temperature, top_k: topK, top_p: topP, min_p: minP, repetition_penalty: repetitionPenalty, seed };
}

/** One conversation: its caches, records and log. One turn at a time. */
export class Conversation {
  /** @param {EdgeClient} client @param {any} snapshot */
  constructor(client, snapshot) {
    this.client = client;
    /** All ids so far, prompts included. @type {number[]} */
    this.ids = snapshot?.ids ?? [];
    /** @type {any} */
    this.interrupted = snapshot?.settings ? snapshot : null;
    /** @type {SessionState | null} */
    this.state = null;
    /** Sessions at the verifier that are no longer needed. @type {Uint8Array[]} */
    this.left = [];
    /** @type {Shell | null} */
    this.last = null;
    this.busy = this.closed = false;
    /** A drafter of this conversation's own, and a place for its records. */
    this.drafter = client.device.newDrafter();
    this.records = new Records(this.drafter.records, client.link?.flow);
  }

  // ---- use

  /** Answer a prompt, given by the ids of the whole context. @param {number[]} ids @param {Partial<Settings>} changes */
  async *generate(ids, changes = {}) {
    this.check(ids);
    this.interrupted = null;
    const settings = { ...this.client.settings, ...changes };
    await this.client.time(this.drafter);
    const state = this.continued(ids, settings) ?? this.begun(ids, settings);
    const shell = this.prepare(state, ids.length, settings);
    yield* this.run(shell, [{ event: "prompt", ids }]);
  }

  /** Have the verifier check the provisional text of the latest answer; ends with another `done`. */
  async *recheck() {
    if (this.interrupted) return yield* this.resume();
    const shell = this.last;
    if (!shell?.machine.transcript.provisional.length) return;
    this.free();
    shell.machine.continueSettling(this.client.environment.now());
    yield* this.run(shell, []);
  }

  /** Go on with the turn that was interrupted when the snapshot was made. */
  async *resume() {
    const { interrupted } = this;
    if (!interrupted) return;
    this.free();
    this.interrupted = null;
    await this.client.time(this.drafter);
    const { ids, start, verified, finish, settings } = interrupted;
    if (interrupted.session) this.left.push(unhex(interrupted.session));
    const log = ids.slice(0, verified);
    this.ids = log;
    const shell = this.prepare(this.begun(log, settings, start), start, settings);
    shell.machine.transcript.restore(ids.slice(verified), finish);
    shell.shown = { start, ids: [...ids], verified };
    yield* this.run(shell, []);
  }

  /** End the running turn. */
  cancel() {
    if (this.busy && this.last) this.last.cancel();
  }

  /** Whether the latest answer has tokens that the verifier may still confirm or correct. */
  get unverified() {
    return this.interrupted ? this.interrupted.verified < this.ids.length : Boolean(this.last?.machine.transcript.provisional.length);
  }

  /** What `EdgeClient.conversation` needs to go on from here, after exactly the events that were given so far. */
  snapshot() {
    if (this.interrupted) return this.interrupted;
    if (!this.last) return { ids: [...this.ids] };
    const { shown, settings, machine: { session } } = this.last;
    const { start, ids, verified } = shown;
    const finish = verified === session.log.length && verified === ids.length ? session.finish : "";
    return { ids: [...ids], start, verified, finish, settings, session: hex(session.id) };
  }

  /** The verifier can drop its sessions. */
  close() {
    this.closed = true;
    this.abandon();
    for (const session of this.left.splice(0)) this.client.link?.closeSession(session);
  }

  // ---- a turn

  /** Run a turn until it ends or its reader stops. @param {Shell} shell @param {any[]} first events */
  async *run(shell, first) {
    const { link, environment } = this.client, { machine } = shell;
    const box = new Mailbox(environment);
    let over = false;
    this.busy = true;
    this.last = shell;
    try {
      link?.newTurn();
      link?.listen(box);
      yield* first;
      for await (const event of shell.events(box)) {
        shell.show(event);
        yield event;
        for (const notice of this.client.news()) yield { event: "notice", message: notice };
      }
      over = !shell.cancelled;
    } finally {
      this.ids = machine.transcript.ids;
      if (!over) {
        const cancel = machine.session.cancel();
        if (cancel) link?.send(cancel);
        this.left.push(...machine.unsentCloses());
      }
      link?.leave(box);
      this.state = machine.sessionState;
      if (machine.session.unsettled.length) this.abandon(); // the next session will share its cached prefix
      if (shell.failed) {
        this.drafter = this.client.device.newDrafter();
        this.records = new Records(this.drafter.records, link?.flow);
        this.abandon();
      }
      this.busy = false;
    }
    const { transcript } = machine;
    transcript.stream.flush();
    yield {
      event: "done",
      reason: shell.reason,
      verified: transcript.verified && transcript.sure.length > 0,
      text: transcript.stream.text,
      stats: shell.report(),
    };
  }

  abandon() {
    if (this.state) this.left.push(this.state.session.id);
    this.state = null;
  }

  free() {
    if (this.closed) throw new Error("the conversation is closed");
    if (this.busy) throw new Error("this conversation is answering already");
  }

  /** @param {number[]} ids */
  check(ids) {
    this.free();
    const most = this.client.maxContext;
    if (!ids.length) throw new Error("the prompt is empty");
    if (ids.length >= most) throw new Error(`the prompt has ${ids.length} tokens, and the context holds ${most}: shorten it, or start anew`);
  }

  /** @param {SessionState} state @param {number} start of the answer @param {Settings} settings */
  prepare(state, start, settings) {
    const { client, records } = this, { device, controller, environment } = client;
    const now = environment.now(), { session } = state;
    const rules = {
      start,
      maxNewTokens: settings.maxNewTokens,
      maxContext: client.maxContext,
      eosIds: new Set(settings.ignoreEos ? [] : device.eosIds),
      stop: settings.stop,
    };
    const transcript = new Transcript(session, rules, device.decode, () => client.newId());
    const { offlineAfter, settleSeconds: settle, answerSeconds: answer } = settings;
    records.precision = settings.sync;
    const machine = new TurnMachine({
      transcript,
      sessionState: state,
      controller,
      records,
      guard: OfflineGuard.of(device.calibration, settings.maxOfflineTokens, () => records.held().length > 0),
      deadlines: new Deadlines({ ...PATIENCE, offlineAfter, settle, answer }, controller, now, session.log.length - session.settled),
      stats: new Stats(now),
      reach: new Reachability(client.link !== null, new Retry(0.1, 1, environment.random)),
      left: this.left,
      draft: settings.draft,
      guesses: settings.guessAhead,
    });
    return new Shell(client, machine, this.drafter, settings);
  }

  /** The session of the previous turn with the new tokens appended, if it can be continued.
   * @param {number[]} ids @param {Settings} settings */
  continued(ids, settings) {
    if (!this.state) return null;
    const { session } = this.state, { log } = session;
    const wanted = wireSampling(settings);
    const alike = same(Object.values(session.sampling), Object.values(wanted));
    const settled = session.settled === log.length && !session.unsettled.length;
    if (!(alike && settled && ids.length > log.length && same(ids.slice(0, log.length), log))) {
      this.abandon();
      return null;
    }
    session.append(ids.slice(log.length), settings);
    return this.state;
  }

  /** A new session. @param {number[]} ids @param {Settings} settings @param {number} start of the answer */
  begun(ids, settings, start = ids.length) {
    const { maxNewTokens, stop, ignoreEos } = settings;
    // Records depend on tokens: those of the common prefix stay valid.
    const common = ids.findIndex((id, i) => id !== this.ids[i]);
    this.records.truncate(common < 0 ? ids.length : common);
    const held = this.records.held(), sampling = wireSampling(settings);
    const fields = { log: [...ids], maxNewTokens, stop, ignoreEos, sampling, held, records: this.records.dtype };
    return new SessionState(new ClientSession({ ...fields, id: this.client.newId(), turnStart: start }));
  }
}

/** The shell around one turn's machine: the link, the drafter, the clock, and the user. */
class Shell {
  /** @param {EdgeClient} client @param {TurnMachine} machine @param {any} drafter @param {Settings} settings */
  constructor(client, machine, drafter, settings) {
    this.client = client;
    this.machine = machine;
    this.drafter = drafter;
    this.settings = settings;
    const { start } = machine.transcript.rules;
    /** What the user was told: ids, and how many of them are verified. */
    this.shown = { start, ids: machine.session.log.slice(0, start), verified: start };
    this.reason = "link";
    this.cancelled = false;
    /** Whether the drafter's caches can be trusted no longer. */
    this.failed = false;
    /** @type {Mailbox | null} */
    this.box = null;
    this.seen = "";
    this.wasUp = 0;
    /** @type {ClientSession | null} */
    this.session = null;
    /** The drafter's current work, and the length that its ids had. @type {Action | null} */
    this.action = null;
    this.length = 0;
    /** @type {any} */
    this.steps = null;
    this.breathedAt = client.environment.now();
    const { link } = client;
    this.before = [link?.sentBytes ?? 0, link?.receivedBytes ?? 0];
  }

  cancel() {
    this.cancelled = true;
    this.box?.ring();
  }

  /** All events until the end of the turn; its messages arrive in `box`. @param {Mailbox} box */
  async *events(box) {
    const { machine, client: { environment: { now } } } = this;
    this.box = box;
    this.session = null;
    this.seen = "";
    this.wasUp = 0;
    for (;;) {
      if (this.cancelled) {
        this.reason = "cancelled";
        break;
      }
      this.take(box);
      const action = machine.nextAction(now());
      const urgent = action.kind === "send" || (action.kind === "draft" && action.quick);
      const told = urgent ? [] : this.drain();
      if (told.length) {
        const since = now();
        yield* told;
        machine.eventsRead(since, now());
        if (action.kind !== "end") continue;
      }
      if (action.kind === "end") {
        this.reason = action.reason;
        break;
      }
      if (action.kind === "send") this.send(action.messages);
      else if (action.kind === "drop") this.client.link?.drop();
      else if (action.kind === "wait") {
        await box.wait(action.until === null ? null : Math.max(0, action.until - now()));
        this.breathedAt = now();
      } else await this.work(action);
    }
    if (!this.cancelled) this.send(machine.lastMessages());
    yield* this.drain();
  }

  /** An event is given to the user. @param {any} event */
  show(event) {
    const { shown } = this;
    if (event.event === "token") {
      shown.ids.push(event.id);
      if (event.status === "verified") shown.verified = shown.ids.length;
    } else if (event.event === "confirm") shown.verified = event.stop;
    else if (event.event === "retract") shown.ids.length = event.start;
  }

  /** Figures of the turn, with the bytes over the link. */
  report() {
    const { link, environment } = this.client, [sent, received] = this.before;
    const report = { ...this.machine.stats.report(environment.now()), record_rows: this.machine.records.count };
    return link ? { ...report, sent_bytes: link.sentBytes - sent, received_bytes: link.receivedBytes - received, rtt_ms: link.rttMs } : report;
  }

  /** Update the machine: new messages, then the state of the link. @param {Mailbox} box */
  take(box) {
    const { machine, client: { link, environment } } = this;
    if (!link) return;
    for (const [arrived, answer] of box.take()) machine.receive(answer, arrived);
    const { state, connections, dialling } = link;
    const seen = `${state} ${connections} ${dialling.failures}`;
    if (seen === this.seen) return;
    this.seen = seen;
    const lost = this.wasUp && (state !== "up" || connections !== this.wasUp);
    if (lost || state !== "up") machine.linkDown(dialling.downSince, link.lastError, state === "refused");
    this.wasUp = state === "up" ? connections : 0;
    if (state === "up" && link.welcome) machine.linkUp(link.welcome, connections, environment.now());
  }

  /** @param {import("./messages.js").Message[]} messages */
  send(messages) {
    const { link } = this.client, { session } = this.machine;
    if (!link) return;
    if (session !== this.session) {
      // answers are routed to the session that asks
      this.session = session;
      link.deliver(session.id, /** @type {Mailbox} */ (this.box));
    }
    for (const request of messages) link.send(request);
  }

  drain() {
    const events = this.machine.drain();
    this.machine.stats.count(events, this.client.environment.now());
    return events;
  }

  // ---- the drafter

  /** Run the drafter for a few milliseconds, and give its result to the machine once it is ready. @param {Action} action */
  async work(action) {
    const { machine, client: { environment: { now, breathe } } } = this;
    if (!this.isAbout(action)) {
      this.action = action;
      this.length = action.ids.length;
      this.steps = this.begin(action);
    }
    const until = now() + BLOCKING;
    while (this.action && now() <= until) {
      let step;
      const start = now();
      try {
        step = await this.steps.next();
        if (step.done) checkResult(action, step.value);
      } catch (error) {
        this.failed = true;
        this.action = null;
        return machine.drafterFailed(`the drafter failed: ${error instanceof Error ? error.message : error}`);
      }
      const { runTokens } = this.drafter;
      if (runTokens <= PIECE) machine.controller.step.observe(runTokens, now() - start);
      if (step.done) {
        this.action = null;
        machine.ran(action, step.value, now());
      }
      if (now() > this.breathedAt + BLOCKING) {
        await breathe();
        this.breathedAt = now();
      }
    }
  }

  /** @param {Action} action */
  begin(action) {
    const ids = [...action.ids], sampling = samplingOf(this.settings);
    if (action.kind === "draft") return this.drafter.draft(ids, action.shape, sampling);
    if (action.kind === "grow") return this.drafter.grow(ids, GUESSED, action.least, sampling);
    return this.drafter.guess(ids, sampling);
  }

  /** Whether this is the current work; a log grows in place and is then different work. @param {Action} action */
  isAbout(action) {
    const current = this.action;
    if (!current || current.kind !== action.kind || this.length !== action.ids.length) return false;
    return current.ids === action.ids || same(current.ids, action.ids);
  }
}

/** Refuse what is no result of this action. @param {Action} action @param {any} result */
function checkResult(action, result) {
  const isId = (/** @type {number} */ id) => Number.isInteger(id) && id >= 0 && id < IDS;
  if (action.kind === "write") {
    if (!isId(result)) throw new Error(`${result} is no token`);
    return;
  }
  const { tokens, parents, scores } = action.kind === "draft" ? result : result.tree;
  const sound = tokens[0] === action.ids[action.ids.length - 1] && tokens.length === parents.length && tokens.length === scores.length;
  const linked = parents.every((/** @type {number} */ parent, /** @type {number} */ node) => (node ? parent >= 0 && parent < node : parent === -1));
  if (!sound || !linked || !tokens.every(isId) || !scores.every(Number.isFinite)) throw new Error("its tree does not follow the text");
  if (action.kind === "grow" && tokens.length < 2) throw new Error("it has no guess");
}
