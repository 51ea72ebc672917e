// The hash of a token log: BLAKE2b with a digest of 16 bytes, in halves of 32 bits.

const IV = Uint32Array.of(
  0xf3bcc908, 0x6a09e667, 0x84caa73b, 0xbb67ae85, 0xfe94f82b, 0x3c6ef372, 0x5f1d36f1, 0xa54ff53a,
  0xade682d1, 0x510e527f, 0x2b3e6c1f, 0x9b05688c, 0xfb41bd6b, 0x1f83d9ab, 0x137e2179, 0x5be0cd19,
);
const SIGMA = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
  [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
  [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
  [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
  [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
  [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];
const COLUMNS = [
  [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
];
const DIGEST = 16, BLOCK = 128;

/** Add to the 64-bit number at `at`. @param {Uint32Array} v @param {number} at @param {number} lo @param {number} hi */
function add(v, at, lo, hi) {
  const sum = v[at] + lo;
  v[at] = sum;
  v[at + 1] += hi + (sum > 0xffffffff ? 1 : 0);
}

/** Xor the number at `a` with the one at `b`, and rotate it right. @param {Uint32Array} v @param {number} a @param {number} b @param {number} bits */
function turn(v, a, b, bits) {
  let lo = v[a] ^ v[b], hi = v[a + 1] ^ v[b + 1];
  if (bits >= 32) [lo, hi, bits] = [hi, lo, bits - 32];
  v[a] = bits ? (lo >>> bits) | (hi << (32 - bits)) : lo;
  v[a + 1] = bits ? (hi >>> bits) | (lo << (32 - bits)) : hi;
}

/** @param {Uint32Array} state @param {Uint32Array} words @param {number} bytes so far @param {boolean} last */
function compress(state, words, bytes, last) {
  const v = new Uint32Array(32);
  v.set(state);
  v.set(IV, 16);
  v[24] ^= bytes;
  v[25] ^= Math.floor(bytes / 2 ** 32);
  if (last) {
    v[28] = ~v[28];
    v[29] = ~v[29];
  }
  for (let round = 0; round < 12; round++) {
    const order = SIGMA[round % 10];
    COLUMNS.forEach((places, i) => {
      const [a, b, c, d] = places.map((place) => 2 * place);
      const x = 2 * order[2 * i], y = 2 * order[2 * i + 1];
      add(v, a, v[b], v[b + 1]);
      add(v, a, words[x], words[x + 1]);
      turn(v, d, a, 32);
      add(v, c, v[d], v[d + 1]);
      turn(v, b, c, 24);
      add(v, a, v[b], v[b + 1]);
      add(v, a, words[y], words[y + 1]);
      turn(v, d, a, 16);
      add(v, c, v[d], v[d + 1]);
      turn(v, b, c, 63);
    });
  }
  for (let i = 0; i < 16; i++) state[i] ^= v[i] ^ v[16 + i];
}

/** A 16-byte hash of a token log, as moa/wire/codec.py has it. @param {number[]} ids */
export function chainHash(ids) {
  const state = Uint32Array.from(IV), size = 4 * ids.length;
  state[0] ^= 0x01010000 ^ DIGEST;
  for (let at = 0; at === 0 || at < size; at += BLOCK) {
    const words = new Uint32Array(32);
    words.set(ids.slice(at / 4, at / 4 + 32));
    compress(state, words, Math.min(at + BLOCK, size), at + BLOCK >= size);
  }
  const digest = new DataView(new ArrayBuffer(DIGEST));
  for (let i = 0; i < 4; i++) digest.setUint32(4 * i, state[i], true);
  return new Uint8Array(digest.buffer);
}
