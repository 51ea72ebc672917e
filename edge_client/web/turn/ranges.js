// A set of rows as sorted, disjoint ranges: which activation records are here. As moa/wire/ranges.py.

export class Ranges {
  /** @param {Iterable<number[]>} ranges half-open: [start, stop] */
  constructor(ranges = []) {
    /** @type {number[][]} */
    this.list = [];
    for (const [start, stop] of ranges) this.add(start, stop);
  }

  /** Add rows, and join adjacent ranges. @param {number} start @param {number} stop */
  add(start, stop) {
    if (start >= stop) return;
    const first = this.list.findIndex((range) => range[1] >= start);
    const apart = first < 0 ? this.list.length : first;
    let next = apart;
    while (next < this.list.length && this.list[next][0] <= stop) {
      start = Math.min(start, this.list[next][0]);
      stop = Math.max(stop, this.list[next][1]);
      next++;
    }
    this.list.splice(apart, next - apart, [start, stop]);
  }

  /** Drop rows from `length` on. @param {number} length */
  truncate(length) {
    this.list = this.list.filter(([start]) => start < length).map(([start, stop]) => [start, Math.min(stop, length)]);
  }

  /** Whether all rows before `length` are here. @param {number} length */
  full(length) {
    return length <= 0 || (this.list.length > 0 && this.list[0][0] === 0 && this.list[0][1] >= length);
  }

  /** The end of the last row. */
  get end() {
    return this.list.length ? this.list[this.list.length - 1][1] : 0;
  }

  [Symbol.iterator]() {
    return this.list[Symbol.iterator]();
  }
}
