// The device in a worker: drafter, turn machine and websocket. The page sends calls and gets chunks.

import { loadGraph, text } from "./bundle.js";
import { Chunks } from "./chunks.js";
import { Codec } from "./codec.js";
import { Drafter } from "./drafter.js";
import { Table } from "./store.js";
import { EdgeClient } from "./turn/client.js";
import { fitting, leftOutNotice, promptRoom } from "./turn/window.js";

const KEPT = 4;  // conversations whose caches are kept
const STORED_EVERY = 0.25;  // seconds between two stores of a running turn
const TOKEN = "moa.token.";  // the subprotocol that carries it: a page cannot set headers
const DAY = 86_400_000;

const turns = new Table("moa-device", "turns");  // a page that was killed in mid-answer finds all tokens again
let ready;  // the device, a promise
let token = "";
const running = new Map();  // turn -> { conversation, store() }
const counted = { drafted: 0, accepted: 0, calls: 0 };  // of all turns

// ---- the device

async function load(config) {
  const { files } = config;
  const [graph, tokenizer, template] = await Promise.all([loadGraph(config), text(files.tokenizer), files.template && text(files.template)]);
  const codec = new Codec(JSON.parse(tokenizer), template, config.special);
  const client = new EdgeClient({
    verifier: config.verifier,
    identities: config.identities,
    device: {
      newDrafter: () => new Drafter(graph), decode: (ids) => codec.decode(ids),
      eosIds: config.eos, maxPositions: config.context, calibration: config.calibration },
    environment: { WebSocket: Authorized },
  });
  client.open();
  await prune();
  return { client, codec, conversations: [] };
}

// The text of an answer is the page's to keep; what is here is needed until the answer is verified.
async function prune() {
  const old = (await turns.all()).filter(({ at, verified }) => Date.now() - at > (verified ? DAY : 30 * DAY));
  for (const { id } of old) await turns.remove(id);
}

class Authorized extends WebSocket {
  constructor(url, protocols) { super(url, token ? [protocols, TOKEN + token].flat() : protocols); }
}

// A conversation that is not answering and begins like these ids, or a new one.
function conversationFor(device, ids) {
  const busy = new Set([...running.values()].map(({ conversation }) => conversation));
  const shared = ({ ids: known }) => { const at = known.findIndex((id, place) => id !== ids[place]); return at < 0 ? known.length : at; };
  const free = device.conversations.filter((one) => !busy.has(one)).sort((a, b) => shared(b) - shared(a));
  let chosen = free.length && shared(free[0]) > ids.length / 2 ? free[0] : null;
  if (!chosen) {
    if (device.conversations.length >= KEPT && free.length) forget(device, free.at(-1));
    chosen = device.client.conversation();
  }
  device.conversations = [...device.conversations.filter((one) => one !== chosen), chosen];
  return chosen;
}

function forget(device, conversation) {
  device.conversations = device.conversations.filter((one) => one !== conversation);
  conversation.close();
}

// ---- turns

async function begin({ id, turn, request }) {
  const device = await ready;
  await turns.put({ id: turn, request, done: false, verified: false, at: Date.now() });
  post(id, { kept: true });
  const { codec, client } = device, { messages, settings } = request;
  const room = codec.template ? promptRoom(client.maxContext, settings.maxNewTokens) : Infinity;
  const { ids, leftOut } = fitting(messages, room, (sent) => codec.encode(codec.render(sent)));
  if (leftOut) post(id, { moa: { notice: leftOutNotice(leftOut) } });
  const conversation = conversationFor(device, ids);
  await run(device, { id, turn, conversation, chunks: new Chunks() }, () => conversation.generate(ids, settings));
}

// A turn that was stored: shown again from its beginning, gone on with, or checked.
async function takeUp({ id, turn }) {
  const device = await ready;
  const kept = await turns.get(turn);
  if (!kept) throw Object.assign(new Error("this answer is no longer kept"), { status: 404 });
  if (!kept.snapshot) return begin({ id, turn, request: kept.request });  // killed before its first token
  const chunks = new Chunks(kept.shown);
  post(id, chunks.replay());
  if (kept.done && (kept.verified || device.client.link?.state !== "up")) return post(id, chunks.state.end);
  const conversation = device.client.conversation(kept.snapshot);
  try {
    await run(device, { id, turn, conversation, chunks }, () => (kept.done ? conversation.recheck() : conversation.resume()));
  } finally {
    conversation.close();
  }
}

// Passes the events of a turn to the page's call `id`, and keeps the turn.
async function run(device, { id, turn, conversation, chunks }, generate) {
  let done = null, stored = 0, storing = Promise.resolve();
  const store = () => {
    stored = performance.now();
    const now = { id: turn, snapshot: conversation.snapshot(), shown: structuredClone(chunks.state), done: Boolean(done), verified: Boolean(done?.verified), at: Date.now() };
    storing = storing.then(() => turns.put(now)).catch((error) => post(id, { moa: { notice: `this browser could not keep the answer: ${error.message}` } }));
    return storing;
  };
  running.set(turn, { conversation, store });
  try {
    for await (const event of generate()) {
      if (event.event === "done") done = event;
      const chunk = chunks.take(event);
      if (done || performance.now() - stored > 1000 * STORED_EVERY) store();
      if (done) await storing;  // kept before the page hears of the end
      if (chunk) post(id, chunk);
    }
    for (const name of Object.keys(counted)) counted[name] += done?.stats?.[name] ?? 0;
  } finally {
    running.delete(turn);
  }
}

// ---- the page

const post = (id, chunk) => self.postMessage({ id, chunk });

function status({ client: { link } }) {
  if (!link) return { state: "none" };
  const { state, lastError, sentBytes, receivedBytes, rtt } = link;
  return { state, detail: lastError, rtt_ms: rtt.samples ? 1000 * rtt.smoothed : null, sent_bytes: sentBytes, received_bytes: receivedBytes, ...counted };
}

const calls = {
  open: async (call) => { token = call.token; await (ready = load(call.config)); },
  token: async (call) => { token = call.token; (await ready).client.networkChanged(); },
  begin,
  takeUp,
  stop: ({ turn }) => running.get(turn)?.conversation.cancel(),
  cut: async ({ connected }) => (await ready).client.cutOff(!connected),
  awake: async () => (await ready).client.networkChanged(),
  hidden: () => { for (const { store } of running.values()) store(); },
  status: async () => status(await ready),
};

self.onmessage = async ({ data }) => {
  try {
    self.postMessage({ id: data.id, end: await calls[data.call](data) });
  } catch (error) {
    self.postMessage({ id: data.id, error: { message: error.message, status: error.status ?? 0 } });
  }
};
