// The page's bundle: its files are fetched, unpacked and compared with their hashes before anything
// reads them.

import { unlzma } from "./lzma.js";
import * as ort from "./vendor/ort.js";

// Where a file lies and what it must be: `files` of config.json, which the page was built with.
export async function content({ name, sha256, size }, unpack = gunzip) {
  const bytes = await unpack(name, size);
  const hash = Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
  if (hash === sha256) return bytes;
  for (const cache of await kept()) {
    for (const file of [name, unpacked(name)]) await cache.delete(file);
  }
  throw new Error(`${name} is damaged: load the page again, or build it again`);
}

async function packed(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} is missing: ${response.status}`);
  return response;
}

async function gunzip(name, size) {
  const bytes = new Uint8Array(size);
  let at = 0;
  for (
    const reader = (await packed(name)).body
      .pipeThrough(new DecompressionStream("gzip"))
      .getReader();
    ;
  ) {
    const { done, value } = await reader.read();
    if (done) return bytes.subarray(0, at);
    if (at + value.length > size) {
      throw new Error(`${name} is damaged: it is longer than ${size} bytes`);
    }
    bytes.set(value, at);
    at += value.length;
  }
}

// The runtime, which takes half a second to unpack: it is kept beside its packed form.
async function runtime(name, size) {
  for (const cache of await kept()) {
    const found = await cache.match(unpacked(name));
    if (found) return new Uint8Array(await found.arrayBuffer());
  }
  const bytes = unlzma(new Uint8Array(await (await packed(name)).arrayBuffer()), size);
  for (const cache of await kept()) {
    if (await cache.match(name)) await cache.put(unpacked(name), new Response(bytes));
  }
  return bytes;
}

const unpacked = (name) => name.replace("packed", "unpacked");

// The caches of this app, as its service worker names them.
async function kept() {
  const scope = new URL("./", self.location.href).href;
  const mine = (await caches.keys()).filter(
    (name) => name.startsWith("moa-app-") && name.endsWith(` ${scope}`),
  );
  return Promise.all(mine.map((name) => caches.open(name)));
}

// What a `Drafter` runs.
export async function loadGraph({ files, graph }) {
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary = (await content(files.runtime, runtime)).buffer;
  const [model, data, map] = await Promise.all([
    content(files.model),
    files.data && content(files.data),
    files.map && content(files.map),
  ]);
  const externalData = data ? [{ path: graph.data, data }] : [];
  const session = await ort.InferenceSession.create(model, {
    executionProviders: ["wasm"],
    externalData,
    logSeverityLevel: 4,
  });
  ort.env.wasm.wasmBinary = undefined; // 14 MB that nobody needs again
  const vocabulary = map
    ? Array.from(new BigInt64Array(map.buffer.slice(graph.map)), Number)
    : graph.vocabulary;
  return { ...graph, ort, session, vocabulary };
}

export async function text(file) {
  return new TextDecoder().decode(await content(file));
}
