// The websocket to the verifier: dialled in the background, shared by all conversations. As edge_client/link/websocket.py
// and edge_client/link/dialling.py. A browser tells no HTTP status and sends no pings: a link that is silent for long while somebody waits
// is asked for a session that does not exist, and every verifier answers that.

import { RoundTrip } from "./estimates.js";
import { FEATURES, Refusal, SUBPROTOCOL, VERSION, clientFrame, decodeServer, message } from "./messages.js";
import { Retry } from "./reach.js";
import { RecordFlow } from "./records.js";
import { ProtocolError, hex, safeLine, unhex } from "./text.js";

/** @typedef {import("./messages.js").Message} Message */
/** What a browser (or a test) gives. @typedef {{WebSocket: any, now: () => number, setTimeout: (call: () => void, ms: number) => any,
 *   clearTimeout: (timer: any) => void, random: () => number, randomBytes: (size: number) => Uint8Array,
 *   breathe: () => Promise<void>}} Environment */

const LEAST_PAUSE = 1, SETTLED_SECONDS = 5;
const MAX_FRAME = 4 * 1024 * 1024, MAX_WAITING = 16_384, MAX_WAITING_BYTES = 16 * 1024 * 1024, MAX_TO_CLOSE = 256;
const FINAL = new Set(["unauthorized", "version", "tokenizer_mismatch", "target_mismatch"]);

/** The other end refuses us, with a code. */
class RemoteError extends Error {
  /** @param {Message} error */
  constructor(error) {
    super(`${safeLine(error.message)}${error.limit ? ` (limit ${safeLine(error.limit)})` : ""}`);
    this.code = error.code;
    this.retryAfter = error.retry_after_ms / 1000;
  }
}

/** Decides when the next attempt is due. */
export class Dialling {
  /** Why connecting has stopped; `newTurn` starts it again. @type {Error | null} */
  refused = null;
  /** Why the latest attempt failed. @type {Error | null} */
  lastError = null;
  /** Disconnected on purpose: no attempt is due. */
  cut = false;
  failures = 0;
  downSince = 0;
  endedAt = -Infinity;
  /** @type {number | null} */
  upSince = null;
  askedWait = 0;
  /** Whether the connection has brought tokens. */
  hasWon = false;

  /** @param {Retry} retry */
  constructor(retry) {
    this.retry = retry;
  }

  /** When the next attempt may begin; null: not before `newTurn`, or while cut off. */
  due() {
    return this.cut || this.refused ? null : this.retry.notBefore;
  }

  /** @param {number} now */
  welcomed(now) {
    this.upSince = now;
    this.lastError = null;
  }

  /** Tokens arrived: however soon the connection ends, the next one may begin at once. */
  won() {
    this.hasWon = true;
  }

  /** An attempt failed, or a connection ended. @param {Error} error @param {number} now */
  ended(error, now) {
    if (this.upSince !== null) {
      this.downSince = now;
      if (this.hasWon || now - this.upSince >= SETTLED_SECONDS) this.retry.progressed();
    }
    this.hasWon = false;
    this.upSince = null;
    this.lastError = error;
    this.endedAt = now;
    this.failures++;
    const remote = error instanceof RemoteError ? error : null;
    if (remote && FINAL.has(remote.code)) this.refused = remote;
    this.retry.failed(now, Math.max(this.askedWait, remote?.retryAfter ?? 0));
    this.askedWait = 0;
  }

  /** A new turn, or a user who asks for a connection: the cause of the last failure may be gone. */
  newTurn() {
    this.refused = null;
    this.retry.notBefore = Math.min(this.retry.notBefore, this.endedAt + LEAST_PAUSE);
  }
}

/** The messages that have arrived for one conversation, with their times. */
export class Mailbox {
  /** @type {[number, Message][]} */
  messages = [];
  bytes = 0;
  /** Set when a message arrived, or the state of the link changed. */
  news = false;
  /** @type {(() => void) | null} */
  wake = null;

  /** @param {Environment} environment */
  constructor(environment) {
    this.environment = environment;
  }

  /** @param {number} arrived @param {Message} answer @param {number} size in bytes */
  put(arrived, answer, size) {
    this.bytes += size;
    if (this.messages.length >= MAX_WAITING || this.bytes > MAX_WAITING_BYTES) {
      throw new ProtocolError(`the verifier sent ${this.bytes} bytes that were not requested`);
    }
    this.messages.push([arrived, answer]);
    this.ring();
  }

  /** All messages since the last call. */
  take() {
    const taken = this.messages;
    this.messages = [];
    this.bytes = 0;
    return taken;
  }

  ring() {
    this.news = true;
    this.wake?.();
  }

  /** Wait for news, or until the time is over. @param {number | null} seconds */
  async wait(seconds) {
    if (this.messages.length) return;
    if (!this.news) {
      await new Promise((/** @type {(value?: any) => void} */ resolve) => {
        this.wake = resolve;
        this.timer = seconds === null ? null : this.environment.setTimeout(resolve, 1000 * seconds);
      });
      this.wake = null;
      if (this.timer) this.environment.clearTimeout(this.timer);
    }
    this.news = false;
  }
}

/** One connection at a time, replaced whenever it is lost. */
export class VerifierLink {
  /** The current connection. @type {any} */
  socket = null;
  /** @type {Message | null} */
  welcome = null;
  up = false;
  /** Number of the current connection; counts those that were welcomed. */
  connections = 0;
  sentBytes = 0;
  receivedBytes = 0;
  wanted = false;
  /** @type {any} */
  timer = null;
  /** When the verifier last sent something, and until when it must answer a probe. */
  heardAt = 0;
  /** @type {{until: number} | null} */
  probed = null;

  /** @param {string} url @param {Record<string, string>} identities @param {Environment} environment
   * @param {{connectSeconds: number, reconnectSeconds: number, keepaliveSeconds: number}} settings */
  constructor(url, identities, environment, settings) {
    this.url = url;
    this.environment = environment;
    this.settings = settings;
    this.hello = message("hello", { versions: [VERSION], features: FEATURES, client: "moa-edge web", ...identities });
    const longest = settings.reconnectSeconds;
    this.dialling = new Dialling(new Retry(Math.min(0.25, longest), longest, environment.random));
    this.flow = new RecordFlow();
    this.rtt = new RoundTrip();
    /** By session. @type {Map<string, Mailbox>} */
    this.mailboxes = new Map();
    /** @type {Set<Mailbox>} */
    this.listening = new Set();
    /** Sessions to close on the next connection. @type {Uint8Array[]} */
    this.toClose = [];
    /** Sessions whose opening, or whose round, was sent on this connection and is not answered; the oldest first. */
    this.opening = new Set();
    this.asking = new Set();
  }

  /** Whether the verifier can be asked now; refused: no new attempt before the next turn.
   * @returns {"up" | "down" | "refused"} */
  get state() {
    return this.up ? "up" : this.dialling.refused ? "refused" : "down";
  }

  /** Why the latest attempt failed, "" if it did not. */
  get lastError() {
    return this.dialling.lastError?.message ?? "";
  }

  get rttMs() {
    return 1000 * this.rtt.smoothed;
  }

  // ---- for conversations

  /** Dial in the background, again and again. */
  open() {
    this.wanted = true;
    this.dialling.downSince = this.environment.now();
    this.schedule();
  }

  close() {
    this.wanted = false;
    this.abandon();
    this.environment.clearTimeout(this.timer);
  }

  /** From now on messages of this session go to this mailbox. @param {Uint8Array} session @param {Mailbox} box */
  deliver(session, box) {
    this.mailboxes.set(hex(session), box);
  }

  /** @param {Mailbox} box */
  listen(box) {
    this.listening.add(box);
    this.heardAt = this.environment.now();
    this.schedule();
  }

  /** @param {Mailbox} box */
  leave(box) {
    this.listening.delete(box);
    for (const [session, owner] of this.mailboxes) if (owner === box) this.mailboxes.delete(session);
    for (const [, answer] of box.messages) this.throwAway(answer);
  }

  /** A new turn: connect again, even if the verifier has refused us. */
  newTurn() {
    this.dialling.newTurn();
    this.schedule();
  }

  /** Send now, or lose the connection. A message that no verifier would read is not sent: its session is refused, and the
   * link goes on for the others. @param {Message} request */
  send(request) {
    if (!this.up || !this.welcome) return;
    const session = request.session ? hex(request.session) : "";
    let frame;
    try {
      frame = clientFrame(request, this.welcome.limits.max_frame_bytes);
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      const { code, message, limit } = error;
      const refused = { kind: "error", code, message, limit, session: request.session, round: 0, retry_after_ms: 0 };
      this.mailboxes.get(session)?.put(this.environment.now(), refused, 0);
      return;
    }
    if (request.kind === "open" || request.kind === "append") this.opening.add(session);
    if (request.kind === "verify" || request.kind === "stream") this.asking.add(session);
    this.transmit(frame);
  }

  /** Close a session: now, or on the next connection. @param {Uint8Array} session */
  closeSession(session) {
    this.opening.delete(hex(session));
    this.asking.delete(hex(session));
    if (this.up) this.send(message("close", { session }));
    else if (this.toClose.length < MAX_TO_CLOSE) this.toClose.push(session);
  }

  /** Abort the connection: it seems dead. A new one is opened. */
  drop() {
    if (this.socket) this.lost(new Error(`the connection to ${this.url} is silent`));
  }

  /** Disconnect, or connect again: to try what happens offline. @param {boolean} cut */
  cutOff(cut) {
    this.dialling.cut = cut;
    if (cut && this.socket) this.lost(new Error("disconnected on purpose"));
    this.newTurn();
  }

  /** The network may be another one, or the page was asleep: dial at once, or ask whether the link still works. */
  networkChanged() {
    if (this.up) {
      this.probe(this.rtt.usual(1));
      this.schedule();
    } else if (!this.socket) {
      this.dialling.retry.notBefore = 0;
      this.newTurn();
    }
  }

  // ---- in the background

  /** Do what is due now, and come back when the next is. */
  schedule() {
    const { now, setTimeout, clearTimeout } = this.environment;
    clearTimeout(this.timer);
    if (!this.wanted) return;
    const at = this.up ? this.watch() : this.socket ? null : this.dialling.due();
    if (at === null) return;
    if (at > now()) this.timer = setTimeout(() => this.schedule(), 1000 * (at - now()));
    else if (this.up) this.drop();
    else this.connect();
  }

  /** When a connection that somebody waits at counts as lost, or is to be looked at again; null: never. */
  watch() {
    const { keepaliveSeconds } = this.settings;
    if (this.probed) return this.probed.until;
    if (!this.listening.size) return null;
    const at = this.heardAt + keepaliveSeconds;
    return this.environment.now() < at ? at : this.probe(2 * keepaliveSeconds);
  }

  /** Ask for what every verifier answers at once. @param {number} seconds within which it must */
  probe(seconds) {
    const { now, randomBytes } = this.environment;
    const until = now() + seconds;
    this.probed = { until };
    const nobody = { session: randomBytes(16), length: 0, chain: new Uint8Array(16), round: 0, records: "off" };
    this.transmit(clientFrame(message("resume", nobody)));
    return until;
  }

  connect() {
    const { WebSocket, now, setTimeout, clearTimeout } = this.environment;
    let said = now();
    try {
      this.socket = new WebSocket(this.url, [SUBPROTOCOL]);
    } catch (error) {
      return this.lost(new Error(`cannot connect to ${this.url}: ${error}`));
    }
    const { socket } = this;
    const mine = () => this.socket === socket;
    const deadline = setTimeout(() => {
      if (mine() && !this.up) this.lost(new Error(`cannot reach ${this.url}: no answer in time`));
    }, 1000 * this.settings.connectSeconds);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      if (!mine()) return;
      said = now();
      this.transmit(clientFrame(this.hello));
    };
    socket.onmessage = (/** @type {{data: any}} */ { data }) => {
      if (!mine()) return;
      try {
        if (!(data instanceof ArrayBuffer) || data.byteLength > MAX_FRAME) throw new ProtocolError("not a frame of the protocol");
        this.receivedBytes += data.byteLength;
        this.heardAt = now();
        if (this.probed) {
          this.probed = null;
          this.schedule();
        }
        const answer = decodeServer(new Uint8Array(data));
        if (this.up) this.take(now(), answer, data.byteLength);
        else this.begin(answer, now() - said);
      } catch (error) {
        const told = error instanceof Refusal ? `the verifier sent an invalid message: ${error.message}` : null;
        this.lost(told || !(error instanceof Error) ? new ProtocolError(told ?? String(error)) : error);
      }
    };
    socket.onclose = (/** @type {{code: number, reason: string}} */ { code, reason }) => {
      clearTimeout(deadline);
      const why = safeLine(reason || `closed with ${code}`);
      if (mine()) this.lost(new Error(this.up ? `the connection ended: ${why}` : `cannot reach ${this.url}: ${why}`));
    };
  }

  /** The first message of a connection. @param {Message} answer @param {number} took seconds */
  begin(answer, took) {
    if (answer.kind === "error") throw new RemoteError(answer);
    if (answer.kind !== "welcome") throw new ProtocolError(`the verifier began with ${answer.kind} instead of a welcome`);
    if (answer.version !== VERSION) throw new ProtocolError(`the verifier chose protocol version ${answer.version}`);
    const { limits } = answer;
    if (Math.min(limits.max_prompt_tokens, limits.max_context_tokens) < 2 || limits.max_chain_tokens < 1) {
      throw new ProtocolError("the verifier's limits leave no room for a prompt and an answer");
    }
    this.rtt.add(took);
    this.flow.connected();
    this.opening.clear();
    this.asking.clear();
    this.dialling.welcomed(this.environment.now());
    this.welcome = answer;
    this.up = true;
    this.connections++;
    for (let session = this.toClose.pop(); session; session = this.toClose.pop()) this.closeSession(session);
    this.schedule();
    this.ring();
  }

  /** Deliver a message of `size` bytes to its conversation. @param {number} arrived @param {Message} answer @param {number} size */
  take(arrived, answer, size) {
    if (answer.kind === "goaway") {
      this.dialling.askedWait = answer.retry_after_ms / 1000;
      return;
    }
    let session = answer.session ? hex(answer.session) : "";
    if (answer.kind === "error" && !session) {
      // It could not be read, so the error cannot name it. If it may have been one of several, all of them are resumed
      // on another connection: nobody can know which lost its message.
      const unread = [...(this.opening.size ? this.opening : this.asking)];
      if (answer.code !== "bad_message" || !unread.length || (unread.length > 1 && !this.opening.size)) throw new RemoteError(answer);
      session = unread[0];
      answer = { ...answer, session: unhex(session) };
    }
    if (answer.kind === "activations") this.flow.arrived(answer.payload.length, arrived);
    else {
      this.opening.delete(session);
      this.asking.delete(session);
      if (answer.kind === "verdict" || answer.tokens?.length || answer.tail?.length) this.dialling.won();
    }
    const box = this.mailboxes.get(session);
    if (box) box.put(arrived, answer, size);
    else this.throwAway(answer);
  }

  /** No conversation waits for it. Records are acknowledged all the same, or the verifier would stop. @param {Message} answer */
  throwAway(answer) {
    if (answer.kind === "activations") this.flow.taken(answer.payload.length);
  }

  /** @param {Uint8Array} frame */
  transmit(frame) {
    this.socket.send(frame);
    this.sentBytes += frame.length;
  }

  /** The connection is gone. @param {Error} why */
  lost(why) {
    this.abandon();
    this.dialling.ended(why, this.environment.now());
    this.schedule();
    this.ring();
  }

  abandon() {
    const { socket } = this;
    this.socket = null;
    this.up = false;
    this.probed = null;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.close();
    }
  }

  /** The state has changed. */
  ring() {
    for (const box of this.listening) box.ring();
  }
}
