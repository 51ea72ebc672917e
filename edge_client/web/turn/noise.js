// The sampling noise of moa/sampling.py, bit for bit: splitmix64 over (seed, position, token), in halves of 32 bits.

/** The upper 32 bits of a product of two unsigned 32-bit numbers. @param {number} a @param {number} b */
function high(a, b) {
  const al = a & 0xffff, ah = a >>> 16, bl = b & 0xffff, bh = b >>> 16;
  const low = al * bl, left = ah * bl, right = al * bh;
  const middle = (low >>> 16) + (left & 0xffff) + (right & 0xffff);
  return (ah * bh + (left >>> 16) + (right >>> 16) + (middle >>> 16)) >>> 0;
}

/** A number of 64 bits that changes in place, and the operations of splitmix64 on it. */
class Word {
  constructor() {
    this.hi = 0;
    this.lo = 0;
  }

  /** Multiply. @param {number} hi @param {number} lo */
  times(hi, lo) {
    this.hi = (high(this.lo, lo) + Math.imul(this.hi, lo) + Math.imul(this.lo, hi)) >>> 0;
    this.lo = Math.imul(this.lo, lo) >>> 0;
  }

  /** Add. @param {number} hi @param {number} lo */
  plus(hi, lo) {
    const sum = this.lo + lo;
    this.hi = (this.hi + hi + (sum > 0xffffffff ? 1 : 0)) >>> 0;
    this.lo = sum >>> 0;
  }

  /** Xor with itself shifted right by 1 to 31 bits. @param {number} bits */
  fold(bits) {
    const lo = (this.lo >>> bits) | (this.hi << (32 - bits));
    this.hi = (this.hi ^ (this.hi >>> bits)) >>> 0;
    this.lo = (this.lo ^ lo) >>> 0;
  }

  mix() {
    this.fold(30);
    this.times(0xbf58476d, 0x1ce4e5b9);
    this.fold(27);
    this.times(0x94d049bb, 0x133111eb);
    this.fold(31);
  }

  /** Be this number times the golden ratio. @param {number} number */
  golden(number) {
    this.hi = Math.floor(number / 2 ** 32);
    this.lo = number >>> 0;
    this.times(0x9e3779b9, 0x7f4a7c15);
  }
}

/** Gumbel noise for `position`, of a whole vocabulary (its size) or of chosen token ids, as the drafter's graph takes it.
 * @param {number} seed up to 2^53 - 1
 * @param {number} position
 * @param {number | ArrayLike<number>} tokens */
export function gumbel(seed, position, tokens) {
  const key = new Word(), step = new Word(), word = new Word();
  key.hi = Math.floor(seed / 2 ** 32);
  key.lo = seed >>> 0;
  key.plus(0x9e3779b9, 0x7f4a7c15);
  key.mix();
  step.golden(position);
  key.plus(step.hi, step.lo);
  key.mix();
  const size = typeof tokens === "number" ? tokens : tokens.length;
  const noise = new Float32Array(size);
  for (let i = 0; i < size; i++) {
    word.golden((typeof tokens === "number" ? i : Number(tokens[i])) + 1);
    word.plus(key.hi, key.lo);
    word.mix();
    const uniform = (word.hi * 2 ** 21 + (word.lo >>> 11) + 0.5) * 2 ** -53;
    noise[i] = -Math.log(-Math.log(uniform));
  }
  return noise;
}
