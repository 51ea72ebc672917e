// One onnxruntime-web session (wasm, as in a browser) under Node.js; speaks the frames of `session.py`.
// node session.mjs MODEL FOLDER: the folder is where npm installed onnxruntime-web.
import { readFileSync, readSync, writeSync } from "node:fs";
import { createRequire } from "node:module";

const KINDS = { float32: Float32Array, int64: BigInt64Array };

function read(length) {
  const bytes = Buffer.alloc(length);
  for (let at = 0; at < length; ) {
    const count = readSync(0, bytes, at, length - at, null);
    if (count === 0) return null;
    at += count;
  }
  return bytes;
}

function write(bytes) {
  for (let at = 0; at < bytes.length; ) {
    try {
      at += writeSync(1, bytes, at);
    } catch (error) {
      if (error.code !== "EAGAIN") throw error; // the pipe is full
    }
  }
}

function writeFrame(head, arrays) {
  const text = Buffer.from(JSON.stringify(head));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  write(Buffer.concat([length, text, ...arrays.map((a) => Buffer.from(a.buffer, a.byteOffset, a.byteLength))]));
}

const [model, folder] = process.argv.slice(2);
const require = createRequire(`${folder}/`);
const ort = require("onnxruntime-web");
ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(readFileSync(model), { executionProviders: ["wasm"] });
writeFrame({ arrays: [], runtime: `onnxruntime-web ${ort.env.versions.web}, node ${process.versions.node}` }, []);
for (let length = read(8); length !== null; length = read(8)) {
  const feeds = {};
  for (const { name, dtype, shape } of JSON.parse(read(Number(length.readBigUInt64LE()))).arrays) {
    const Kind = KINDS[dtype];
    const size = shape.reduce((product, side) => product * side, 1);
    const bytes = read(size * Kind.BYTES_PER_ELEMENT);
    feeds[name] = new ort.Tensor(dtype, new Kind(new Uint8Array(bytes).buffer), shape); // copied, so aligned
  }
  const found = await session.run(feeds);
  const outputs = session.outputNames.map((name) => found[name]);
  const arrays = outputs.map((out, i) => ({ name: `${i}`, dtype: out.type, shape: out.dims }));
  writeFrame({ arrays }, outputs.map((out) => out.data));
}
