// Unpacks LZMA without a header, with 3 literal context bits and no position bits, as
// edge_client/tools/web_app.py packs the runtime: 1.4 MB less than gzip, whose window has 32 KiB.

const STATES = 12;
// After a literal, by the state before it.
const LITERAL_STATE = [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 4, 5];

export function unlzma(source, size) {
  const out = new Uint8Array(size);
  let next = 1;
  let range = 0xffffffff;
  let code = 0; // the first byte is 0
  while (next < 5) code = ((code << 8) | source[next++]) >>> 0;

  const chances = (count) => new Uint16Array(count).fill(1024);
  const matches = chances(STATES);
  const shortReps = chances(STATES);
  const reps = [chances(STATES), chances(STATES), chances(STATES), chances(STATES)];
  const literals = chances(8 * 0x300);
  const slots = chances(4 * 64);
  const near = chances(128);
  const aligned = chances(16);
  const lengths = () => ({
    kind: chances(2),
    low: chances(8),
    middle: chances(8),
    high: chances(256),
  });
  const matchLengths = lengths();
  const repLengths = lengths();

  function bit(table, at) {
    const chance = table[at];
    const bound = (range >>> 11) * chance;
    let found = 0;
    if (code < bound) {
      range = bound;
      table[at] = chance + ((2048 - chance) >>> 5);
    } else {
      range -= bound;
      code -= bound;
      table[at] = chance - (chance >>> 5);
      found = 1;
    }
    if (range < 0x1000000) more();
    return found;
  }
  function more() {
    range = range * 256;
    code = ((code << 8) | source[next++]) >>> 0;
  }
  function evenBits(count) {
    let found = 0;
    while (count--) {
      range >>>= 1;
      const one = code >= range ? 1 : 0;
      if (one) code -= range;
      if (range < 0x1000000) more();
      found = (found << 1) | one;
    }
    return found;
  }
  function bits(table, first, count) {
    let found = 1;
    for (let left = count; left; left--) found = (found << 1) | bit(table, first + found);
    return found - (1 << count);
  }
  function bitsFromLowest(table, first, count) {
    let found = 0;
    let node = 1;
    for (let at = 0; at < count; at++) {
      const one = bit(table, first + node);
      node = (node << 1) | one;
      found |= one << at;
    }
    return found;
  }
  function length({ kind, low, middle, high }) {
    if (!bit(kind, 0)) return 2 + bits(low, 0, 3);
    return bit(kind, 1) ? 18 + bits(high, 0, 8) : 10 + bits(middle, 0, 3);
  }
  function distance(long) {
    const slot = bits(slots, 64 * Math.min(long - 2, 3), 6);
    if (slot < 4) return slot;
    const count = (slot >> 1) - 1;
    const start = (2 | (slot & 1)) << count;
    if (slot < 14) return start + bitsFromLowest(near, start - slot, count);
    return start + (evenBits(count - 4) << 4) + bitsFromLowest(aligned, 0, 4);
  }

  const last = [0, 0, 0, 0]; // distances, less 1
  for (let at = 0, state = 0; at < size;) {
    if (!bit(matches, state)) {
      const first = 0x300 * (at ? out[at - 1] >> 5 : 0);
      let symbol = 1;
      if (state >= 7) {
        for (
          let expected = out[at - last[0] - 1], same = true;
          same && symbol < 0x100;
          expected <<= 1
        ) {
          const wanted = (expected >> 7) & 1;
          const one = bit(literals, first + ((1 + wanted) << 8) + symbol);
          symbol = (symbol << 1) | one;
          same = one === wanted;
        }
      }
      while (symbol < 0x100) symbol = (symbol << 1) | bit(literals, first + symbol);
      out[at++] = symbol;
      state = LITERAL_STATE[state];
      continue;
    }
    let long = 0;
    if (!bit(reps[0], state)) {
      long = length(matchLengths);
      last.unshift(distance(long));
      last.pop();
      state = state < 7 ? 7 : 10;
    } else {
      let which = 0;
      if (!bit(reps[1], state)) {
        if (!bit(shortReps, state)) long = 1;
      } else if (!bit(reps[2], state)) {
        which = 1;
      } else {
        which = bit(reps[3], state) ? 3 : 2;
      }
      last.unshift(...last.splice(which, 1));
      if (long) {
        state = state < 7 ? 9 : 11;
      } else {
        long = length(repLengths);
        state = state < 7 ? 8 : 11;
      }
    }
    const from = at - last[0] - 1;
    if (from < 0 || at + long > size) break; // damaged, which the caller notices by the hash
    if (from + long <= at) out.copyWithin(at, from, from + long);
    else for (let i = 0; i < long; i++) out[at + i] = out[from + i];
    at += long;
  }
  return out;
}
