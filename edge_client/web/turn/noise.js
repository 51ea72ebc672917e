// The sampling noise of moa/sampling.py, bit for bit: splitmix64 over (seed, position, token), in
// halves of 32 bits.

const GOLDEN = [0x9e3779b9, 0x7f4a7c15];

/** The upper 32 bits of a product of two unsigned 32-bit numbers.
 * @param {number} a
 * @param {number} b */
function high(a, b) {
  const al = a & 0xffff;
  const ah = a >>> 16;
  const bl = b & 0xffff;
  const bh = b >>> 16;
  const left = ah * bl;
  const right = al * bh;
  const middle = ((al * bl) >>> 16) + (left & 0xffff) + (right & 0xffff);
  return ah * bh + (left >>> 16) + (right >>> 16) + (middle >>> 16);
}

/** Put splitmix64's mix of `key + number * golden ratio` into `out`, the upper half first. The
 * `key` may be `out`.
 * @param {Uint32Array} out
 * @param {Uint32Array} key
 * @param {number} number up to 2^53 */
function mix(out, key, number) {
  const above = Math.floor(number / 2 ** 32);
  let hi = high(number, GOLDEN[1]) + Math.imul(number, GOLDEN[0]) + Math.imul(above, GOLDEN[1]);
  const sum = (Math.imul(number, GOLDEN[1]) >>> 0) + key[1];
  let lo = sum | 0;
  hi = (hi + key[0] + (sum > 0xffffffff ? 1 : 0)) | 0;
  lo ^= (lo >>> 30) | (hi << 2);
  hi ^= hi >>> 30;
  hi = (high(lo, 0x1ce4e5b9) + Math.imul(hi, 0x1ce4e5b9) + Math.imul(lo, 0xbf58476d)) | 0;
  lo = Math.imul(lo, 0x1ce4e5b9);
  lo ^= (lo >>> 27) | (hi << 5);
  hi ^= hi >>> 27;
  hi = (high(lo, 0x133111eb) + Math.imul(hi, 0x133111eb) + Math.imul(lo, 0x94d049bb)) | 0;
  lo = Math.imul(lo, 0x133111eb);
  out[1] = lo ^ ((lo >>> 31) | (hi << 1));
  out[0] = hi ^ (hi >>> 31);
}

/** Gumbel noise for `position`, of a whole vocabulary (its size) or of chosen token ids, as the
 * drafter's graph takes it.
 * @param {number} seed up to 2^53 - 1
 * @param {number} position
 * @param {number | ArrayLike<number>} tokens */
export function gumbel(seed, position, tokens) {
  const key = Uint32Array.of(Math.floor(seed / 2 ** 32), seed);
  const bits = new Uint32Array(2);
  mix(key, key, 1);
  mix(key, key, position);
  const ids = typeof tokens === "number" ? null : tokens;
  const noise = new Float32Array(typeof tokens === "number" ? tokens : tokens.length);
  for (let i = 0; i < noise.length; i++) {
    mix(bits, key, (ids ? Number(ids[i]) : i) + 1);
    noise[i] = -Math.log(-Math.log((bits[0] * 2 ** 21 + (bits[1] >>> 11) + 0.5) * 2 ** -53));
  }
  return noise;
}
