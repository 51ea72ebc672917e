// The device in a worker: the drafter, and the endpoint that it asks. The page sends calls and gets
// chunks.

import { loadGraph, text } from "./bundle.js";
import { Codec } from "./codec.js";
import { Drafter } from "./drafter.js";
import { events } from "./events.js";
import { Table } from "./store.js";
import { Answering } from "./turn/answering.js";
import { Endpoint } from "./turn/endpoint.js";
import { Turn } from "./turn/turn.js";
import { needsVerifier, NoWriter, Writer } from "./turn/writer.js";

const KEPT = 4; // drafters, each with the cache of its last text
const PATIENCE = 20; // seconds that an answer which only the verifier can write waits for it
const STORED_EVERY = 0.25; // seconds between two stores of a running turn
const DAY = 86_400_000;

// A page that was killed in mid-answer finds its text again.
const turns = new Table("moa-device", "turns");
let ready; // the device, a promise
const running = new Map(); // turn -> { answering, store() }
// Of the target, in all turns that an endpoint ended.
const counted = { forwards: 0, forward_tokens: 0 };

const environment = {
  events,
  fetch: (...how) => fetch(...how),
  now: () => performance.now() / 1000,
  random: Math.random,
  setTimeout: (call, ms) => setTimeout(call, ms),
  clearTimeout: (timer) => clearTimeout(timer),
  breathe,
};

// Lets messages and the network have their turn. A timer would wait 4 ms.
function breathe() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

// ---- the device

const endpoints = new Map(); // by address: those that were asked, each with its own state
let address = ""; // of the one that new answers are asked of; "" for none
let cut = false;

// The endpoint of this address, null for none.
function endpointAt(place) {
  if (!place) return null;
  if (!endpoints.has(place)) {
    const made = new Endpoint(new URL(place, self.location.href).href, environment);
    if (cut) made.cutOff(true);
    endpoints.set(place, made);
  }
  return endpoints.get(place);
}

async function open(call) {
  address = call.address ?? "";
  token(call);
  endpointAt(address)
    ?.look()
    .catch(() => {}); // it is asked while the drafter is loaded
  ready = load(call.config);
  await ready;
}

async function load(config) {
  const { files } = config;
  const [graph, tokenizer, template] = await Promise.all([
    loadGraph(config),
    text(files.tokenizer),
    files.template && text(files.template),
  ]);
  const codec = new Codec(JSON.parse(tokenizer), template, config.special);
  const drafters = [];
  await prune();
  return {
    config,
    encode: (words) => codec.encode(words),
    decode: (ids) => codec.decode(ids),
    render: (messages) => codec.render(messages),
    hasTemplate: Boolean(codec.template),
    eosIds: config.eos,
    maxPositions: config.context,
    maxTokens: config.max_tokens,
    calibration: config.calibration,
    drafterFor: (ids) => lend(drafters, ids, graph),
    free: (drafter) => drafters.push(drafter),
  };
}

// The drafter that knows most of these ids, if it knows half of them; else a new one.
function lend(drafters, ids, graph) {
  const known = (drafter) => {
    const differs = drafter.ids.findIndex((id, at) => id !== ids[at]);
    return differs < 0 ? drafter.ids.length : differs;
  };
  const best = drafters.reduce(
    (found, one) => (found && known(found) >= known(one) ? found : one),
    null,
  );
  if (best && (known(best) > ids.length / 2 || drafters.length >= KEPT)) {
    drafters.splice(drafters.indexOf(best), 1);
    return best;
  }
  return new Drafter(graph);
}

// The text of an answer is the page's to keep; what is here is needed until the answer is verified.
async function prune() {
  const old = (await turns.all()).filter(
    ({ at, verified }) => Date.now() - at > (verified ? DAY : 30 * DAY),
  );
  for (const { id } of old) await turns.remove(id);
}

// ---- turns

async function begin({ id, turn, body, settle }) {
  const device = await ready;
  const kept = { id: turn, body, settle, address, done: false, verified: false, at: Date.now() };
  await turns.put(kept);
  post(id, { kept: true });
  await run(device, id, kept, new Turn(), { writes: true });
}

// A turn that was stored: shown again from its beginning, gone on with, or checked.
async function takeUp({ id, turn }) {
  const device = await ready;
  const kept = await turns.get(turn);
  if (!kept?.body) throw Object.assign(new Error("this answer is no longer kept"), { status: 404 });
  const answer = new Turn(kept.state);
  const { end } = answer;
  if (kept.state) post(id, answer.replay());
  if (!end) return run(device, id, kept, answer, { writes: true });
  post(id, end);
  if (kept.verified) return;
  if (answer.refused) throw Object.assign(new Error(answer.refused), { status: 404 });
  if (endpointAt(kept.address)?.state !== "online") return;
  answer.end = null;
  await run(device, id, kept, answer, { writes: false, lost: end.choices[0].moa.reason });
}

function writerOf(device, body, waits) {
  return waits ? new NoWriter() : new Writer(device, body);
}

// Passes what happens in a turn to the page's call `id`, and keeps the turn.
async function run(device, id, kept, turn, { writes, lost }) {
  let stored = 0;
  let storing = Promise.resolve();
  const store = () => {
    stored = environment.now();
    const verified = Boolean(turn.end?.choices[0].moa.all_verified);
    const now = { ...kept, state: turn.kept(), done: Boolean(turn.end), verified, at: Date.now() };
    storing = storing
      .then(() => turns.put(now))
      .catch((error) =>
        post(id, { moa: { notice: `this browser could not keep the answer: ${error.message}` } }),
      );
    return storing;
  };
  let ended = null; // told when it is kept
  const emit = (chunk) => {
    if (turn.end) ended = ended ? [...ended, chunk] : [chunk];
    else post(id, chunk);
    for (const name of Object.keys(counted)) counted[name] += chunk.usage?.moa?.[name] ?? 0;
    if (environment.now() - stored > STORED_EVERY) store();
  };
  const waits = needsVerifier(kept.body);
  const writer = writes ? writerOf(device, kept.body, waits) : null;
  const settle = waits ? Math.max(kept.settle, PATIENCE) : kept.settle;
  const answering = new Answering({
    turn,
    body: kept.body,
    endpoint: endpointAt(kept.address),
    writer,
    environment,
    settle,
    lost,
    emit,
  });
  running.set(kept.id, { answering, store });
  try {
    await answering.run();
  } finally {
    running.delete(kept.id);
    await store();
    for (const chunk of ended ?? []) post(id, chunk);
  }
}

// ---- the page

const post = (id, chunk) => self.postMessage({ id, chunk });

async function status() {
  await ready;
  const endpoint = endpointAt(address);
  return endpoint
    ? { ...endpoint.status(), ...counted, address: endpoint.address }
    : { link: "none" };
}

// A key is for the endpoint that asked for it, and for no other.
function token(call) {
  endpointAt(address)?.useToken(call.token);
}

function cutOff({ connected }) {
  cut = !connected;
  for (const endpoint of endpoints.values()) endpoint.cutOff(cut);
}

const calls = {
  open,
  token,
  choose: (call) => {
    address = call.address;
  },
  begin,
  takeUp,
  stop: ({ turn }) => running.get(turn)?.answering.stop(),
  cut: cutOff,
  count: async ({ text }) => (await ready).encode(text).length,
  awake: () => {
    for (const endpoint of endpoints.values()) endpoint.networkChanged();
  },
  hidden: () => {
    for (const { store } of running.values()) store();
  },
  status,
};

self.onmessage = async ({ data }) => {
  try {
    self.postMessage({ id: data.id, end: await calls[data.call](data) });
  } catch (error) {
    self.postMessage({
      id: data.id,
      error: { message: error.message, status: error.status ?? 0, code: error.code },
    });
  }
};
