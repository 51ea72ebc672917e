// The page's back end: an endpoint. Server-sent events over fetch, which can send a key, and can go
// on where a stream broke off. In the app edge_client/web/stream.js takes this file's place.

import { events } from "./events.js";
import { script } from "./script.js";

navigator.serviceWorker?.register(script("sw.js")).catch(() => {});

export const MODES = true; // whether unverified text can be held back, or kept
export const SAME_AGAIN = true; // whether a stream that is read again has the same chunks
export const ENDPOINTS = []; // the page asks the one that serves it
export function choose() {}

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the endpoint answered ${status}`);
    this.status = status;
    this.code = body?.error?.code;
  }
}

function headers(key, more = {}) {
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

async function checked(response) {
  if (response.ok) return response;
  throw new ApiError(response.status, await response.json().catch(() => null));
}

const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        resolve();
      },
      { once: true },
    );
  });

function posted(path, body, key, signal) {
  const json = { "Content-Type": "application/json" };
  return fetch(path, {
    method: "POST",
    headers: headers(key, json),
    body: JSON.stringify(body),
    signal,
  });
}

const CHAT = "/v1/chat/completions";

// The stream `id` after the event `seen`, from its beginning where that is "".
function resumed(id, seen, key, signal) {
  const after = seen ? { "Last-Event-ID": seen } : {};
  return fetch(`/v1/streams/${id}`, { headers: headers(key, after), signal });
}

// Starts an answer, or takes up the stream `id`; yields its chunks, and goes on by itself after a
// broken connection. `started` learns the stream's id.
export async function* chunks({ body, id = "", key, signal, started = () => {} }) {
  let seen = "";
  let tries = 0;
  while (!signal.aborted) {
    try {
      const asked = id ? resumed(id, seen, key, signal) : posted(CHAT, body, key, signal);
      const response = await checked(await asked);
      if (!id) {
        id = response.headers.get("X-Request-Id") ?? "";
        started(id);
      }
      for await (const event of events(response)) {
        tries = 0;
        seen = event.id || seen;
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new ApiError(503, chunk);
        yield chunk;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError) throw error;
      if (!id) throw new ApiError(0, { error: { message: "the endpoint does not answer" } });
    }
    // The connection broke: take the stream up again.
    await pause(Math.min(5000, 200 * 2 ** tries++), signal);
  }
}

export async function stop(id, key) {
  await fetch(`/v1/streams/${id}`, { method: "DELETE", headers: headers(key) }).catch(() => {});
}

// How many tokens a text has.
export async function count(text, key) {
  const found = await checked(await posted("/tokenize", { content: text }, key));
  return (await found.json()).count;
}

async function get(path, key) {
  return (await checked(await fetch(path, { headers: headers(key) }))).json();
}

// The link's state, and figures of the endpoint.
export function status(key) {
  return get("/moa/status", key);
}

export async function model(key) {
  return (await get("/v1/models", key)).data[0].id;
}

// Cuts the verifier off on purpose, or connects it again.
export async function setLink(connected, key) {
  await checked(await posted("/moa/link", { connected }, key));
}
