// The page's bundle: its files are fetched, unpacked and compared with their hashes before anything reads them.

import * as ort from "./vendor/ort.js";

// Where a file lies, how it is packed and what it must be: `files` of config.json, which the page was built with.
export async function content({ name, sha256, size }, from = "./") {
  const response = await fetch(from + name);
  if (!response.ok) throw new Error(`${name} is missing: ${response.status}`);
  const bytes = new Uint8Array(size);
  let at = 0;
  for await (const piece of pieces(response.body.pipeThrough(new DecompressionStream("gzip")))) {
    if (at + piece.length > size) throw new Error(`${name} is damaged: it is longer than ${size} bytes`);
    bytes.set(piece, at);
    at += piece.length;
  }
  const hash = Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (at !== size || hash !== sha256) {
    for (const cache of await caches.keys()) await (await caches.open(cache)).delete(from + name);
    throw new Error(`${name} is damaged: load the page again, or build it again`);
  }
  return bytes;
}

async function* pieces(stream) {
  for (const reader = stream.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

// What a `Drafter` runs.
export async function loadGraph({ files, graph }) {
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary = (await content(files.runtime)).buffer;
  const [model, data, map] = await Promise.all([content(files.model), files.data && content(files.data), files.map && content(files.map)]);
  const externalData = data ? [{ path: graph.data, data }] : [];
  const session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"], externalData, logSeverityLevel: 4 });
  ort.env.wasm.wasmBinary = undefined;  // 14 MB that nobody needs again
  const vocabulary = map ? Array.from(new BigInt64Array(map.buffer.slice(graph.map)), Number) : graph.vocabulary;
  return { ...graph, ort, session, vocabulary };
}

export async function text(file) { return new TextDecoder().decode(await content(file)); }
