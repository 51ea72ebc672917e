// The page's back end in the app: the same functions as in edge_client/serve/page/stream.js, over a
// worker of this page, which writes where the endpoint does not answer. Copied over it when the app
// is built.

import { script } from "./script.js";

const config = await (await fetch("config.json")).json();
const waiting = new Map(); // call's id -> what takes its messages
// What is said of the embedded model.
const TOY =
  "This is a small model for demonstration. It adds and subtracts, compares, sorts, counts " +
  "weekdays and tells short stories.";
let calls = 0;
let loaded = false;
let cut = false;
let failed = "";
let token = sessionStorage.getItem("key") ?? "";

export const MODES = false; // unverified text is shown, and corrected
export const SAME_AGAIN = false; // a turn that is taken up tells in one chunk what it has
// Whom the user may choose from; the first, where he has not.
export const ENDPOINTS = config.endpoints;

export class ApiError extends Error {
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// ---- the worker

const worker = start();

// It is loaded through the service worker, so that its files come over the network once; without
// one, directly.
async function start() {
  if (!isSecureContext) {
    throw new ApiError(0, "a browser runs the device only from https, or from this machine");
  }
  const room = navigator.deviceMemory
    ? Math.min(4, navigator.deviceMemory / 2)
    : config.small / 2 ** 30;
  if (config.memory > room * 2 ** 30) throw new ApiError(0, tooLarge(room));
  await controlled();
  const made = new Worker(script("worker.js"), { type: "module" });
  made.onmessage = ({ data }) => waiting.get(data.id)?.(data);
  made.onerror = ({ message }) => {
    failed = message || "its program could not be loaded";
    for (const take of [...waiting.values()]) take({ error: { message: failed, status: 0 } });
  };
  return made;
}

function tooLarge(room) {
  const needed = (config.memory / 2 ** 30).toFixed(1);
  return (
    `its model takes ${needed} GB of memory, and a page in this browser gets about ${room} GB: ` +
    "open it on a device with more, or write the page with a smaller bundle"
  );
}

// Until the service worker has all files, however long that takes, or is known to fail.
async function controlled() {
  const workers = navigator.serviceWorker;
  const registration = await workers?.register(script("sw.js")).catch(() => null);
  if (!registration || workers.controller) return;
  await new Promise((resolve) => {
    workers.addEventListener("controllerchange", resolve, { once: true });
    workers.ready.then(() => setTimeout(resolve, 2000)); // a reload past the service worker
    registration.installing?.addEventListener("statechange", ({ target }) => {
      if (target.state === "redundant") resolve();
    });
  });
}

// Yields the chunks of a call; returns its result.
async function* call(name, more = {}) {
  const id = ++calls;
  const messages = [];
  let wake = () => {};
  waiting.set(id, (message) => {
    messages.push(message);
    wake();
  });
  try {
    (await worker).postMessage({ call: name, id, ...more });
    for (;;) {
      while (messages.length) {
        const { chunk, error, ...message } = messages.shift();
        if (error) throw new ApiError(error.status, error.message, error.code);
        if (!chunk) return message.end;
        yield chunk;
      }
      await new Promise((resolve) => {
        wake = resolve;
      });
    }
  } finally {
    waiting.delete(id);
  }
}

const result = async (name, more) => (await call(name, more).next()).value;

// A call whose answer does not matter.
const tell = (name, more) => {
  if (loaded) result(name, more).catch(() => {});
};

const chosen = JSON.parse(localStorage.getItem("settings") ?? "{}").endpoint;
const opened = result("open", {
  config,
  token,
  address: ENDPOINTS.includes(chosen) ? chosen : ENDPOINTS[0],
}).then(
  () => {
    loaded = true;
  },
  (error) => {
    failed = error.message;
  },
);

// ---- what the page asks for

export const count = (text) => result("count", { text });

export function model() {
  return config.model;
}

export async function status(key = "") {
  if (loaded && key !== token) tell("token", { token: (token = key) });
  const { demo: isDemo, context, max_tokens } = config;
  const about = { demo: isDemo, toy: isDemo ? [TOY] : [], context, max_tokens };
  if (failed) return { link: "broken", detail: failed, ...about };
  if (!loaded) return { link: "connecting", detail: "loading the drafter", ...about };
  const { about: of = {}, address, ...figures } = await result("status");
  const model = of.model ?? config.model; // whose text it is, the endpoint knows
  const demo = isDemo && model === config.model;
  if (!address) return { ...figures, ...about };
  return {
    ...figures,
    ...about,
    model,
    demo,
    toy: demo ? about.toy : [],
    context: of.context ?? config.context,
    cut,
    verifier: new URL(address).host,
    verifier_version: of.verifier_version,
  };
}

// New answers are asked for there; those that run stay where they are.
export function choose(address) {
  result("choose", { address }).catch(() => {});
}

export async function setLink(connected) {
  cut = !connected;
  await result("cut", { connected });
}

export async function* chunks({ body, id = "", signal, started = () => {} }) {
  const turn = id || crypto.randomUUID();
  navigator.storage?.persist?.();
  signal.addEventListener("abort", () => stop(turn), { once: true });
  await opened;
  if (failed) throw new ApiError(0, `the drafter could not be loaded: ${failed}`);
  // One tab answers a turn; another one that shows it waits for its end.
  const release = await lock(turn);
  try {
    if (signal.aborted) return;
    const asked = body && { turn, body: request(body), settle: body.moa.patience ?? 1 };
    for await (const chunk of id ? call("takeUp", { turn }) : call("begin", asked)) {
      if (chunk.kept) started(turn);
      else yield chunk;
    }
  } finally {
    release();
  }
}

export function stop(turn) {
  tell("stop", { turn });
}

// What the endpoint is asked: its text may be corrected here, and is resumed after a cut. The seed
// is the page's, so that the same text is asked for again where a stream is lost.
function request(asked) {
  const { ...body } = asked;
  delete body.model; // the endpoint has one
  const seed = body.seed ?? (body.temperature ? random() : undefined);
  const streamed = {
    stream: true,
    stream_options: { include_usage: true },
    reasoning_format: "none",
  };
  return {
    ...body,
    ...streamed,
    ...(seed !== undefined && { seed }),
    moa: { ...body.moa, mode: "provisional", resumable: true },
  };
}

const random = () => crypto.getRandomValues(new Uint32Array(1))[0];

function lock(turn) {
  return new Promise((resolve) => {
    if (!navigator.locks) {
      resolve(() => {});
      return;
    }
    navigator.locks.request(
      `turn-${turn}`,
      () =>
        new Promise((release) => {
          resolve(release);
        }),
    );
  });
}

// ---- the phone

addEventListener("online", () => tell("awake"));
addEventListener("pageshow", () => tell("awake"));
addEventListener("pagehide", () => tell("hidden"));
document.addEventListener("freeze", () => tell("hidden"));
document.addEventListener("visibilitychange", () => tell(document.hidden ? "hidden" : "awake"));
