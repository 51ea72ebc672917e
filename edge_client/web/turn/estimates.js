// Running estimates of what the device measures, as edge_client/link/estimates.py, moa/speculation/cost.py and the
// `LevelRates` of moa/speculation/policy.py. Times are in seconds.

import { rint } from "./guesses.js";

/** Smoothed round-trip time and its variation, as TCP estimates them. */
export class RoundTrip {
  smoothed = 0;
  variation = 0;
  samples = 0;

  /** @param {number} seconds */
  add(seconds) {
    seconds = Math.max(0, seconds);
    if (!this.samples) {
      this.smoothed = seconds;
      this.variation = seconds / 2;
    } else {
      this.variation += (Math.abs(seconds - this.smoothed) - this.variation) / 4;
      this.smoothed += (seconds - this.smoothed) / 8;
    }
    this.samples++;
  }

  /** Seconds within which an answer should arrive if the server needs `expected`. @param {number} expected */
  usual(expected) {
    return this.smoothed + 4 * this.variation + 2 * expected;
  }
}

/** An exponentially weighted mean; the first few samples count as a plain mean. */
export class Smoothed {
  value = 0;
  samples = 0;

  /** @param {number} sample */
  add(sample) {
    this.value += (sample - this.value) * Math.max(0.2, 1 / (this.samples + 1));
    this.samples++;
  }
}

/** Tokens a second, as a ratio of sums over about two seconds. */
export class Pace {
  tokens = 0;
  seconds = 0;

  /** @param {number} tokens @param {number} seconds */
  add(tokens, seconds) {
    const kept = Math.exp(-seconds / 2);
    this.tokens = this.tokens * kept + tokens;
    this.seconds = this.seconds * kept + seconds;
  }

  get rate() {
    return this.seconds > 0 ? this.tokens / this.seconds : 0;
  }
}

/** Expected guesses in a row that are right, from the share of right ones among the latest. */
export class Streak {
  /** Guesses of this text so far. */
  judged = 0;

  /** @param {number} rate @param {number} weight in guesses */
  constructor(rate, weight) {
    this.right = weight * rate;
    this.wrong = weight * (1 - rate);
  }

  /** `right` guesses were right, and then one was wrong, or there was none. @param {number} right @param {boolean} wrong */
  add(right, wrong) {
    const kept = 0.98 ** (right + Number(wrong));
    this.right = this.right * kept + right;
    this.wrong = this.wrong * kept + Number(wrong);
    this.judged += right + Number(wrong);
  }

  /** Another text: earlier guesses count as so many at most. @param {number} weight */
  begin(weight) {
    const kept = Math.min(1, weight / Math.max(1e-9, this.right + this.wrong));
    this.right *= kept;
    this.wrong *= kept;
    this.judged = 0;
  }

  /** Expected guesses before the next wrong one. */
  get length() {
    return this.right / Math.max(1e-3, this.wrong);
  }

  /** The same if the next one is wrong. */
  get atLeast() {
    return this.right / (this.wrong + 1);
  }
}

const WEIGHT = 0.3, OUTLIER = 2, SHORTEST = 1e-9, SLOPE = 0.01;

/** Seconds by size, with straight lines between measured sizes. */
export class Cost {
  /** @param {number} prior seconds of the smallest size */
  constructor(prior) {
    /** @type {Map<number, {size: number, seconds: number, whole: number}>} */
    this.points = new Map();
    this.sizes = [1];
    this.times = [prior];
  }

  get known() {
    return this.points.size > 0;
  }

  /** @param {number} size @param {number} seconds */
  observe(size, seconds) {
    const group = rint(2 * Math.log2(Math.max(1, size)));
    seconds = Math.max(SHORTEST, seconds);
    const point = this.points.get(group) ?? { size, seconds, whole: seconds };
    this.points.set(group, point);
    seconds = Math.min(seconds, OUTLIER * point.whole);
    point.size += WEIGHT * (size - point.size);
    point.seconds = Math.min(OUTLIER * seconds, point.seconds + WEIGHT * (seconds - point.seconds));
    point.whole += 0.1 * (seconds - point.whole);
    const known = [...this.points.values()].sort((a, b) => a.size - b.size);
    for (const other of known) {
      // what is older gives way: no size is dearer than a larger one
      if (other.size > point.size === other.seconds < point.seconds) other.seconds += WEIGHT * (point.seconds - other.seconds);
    }
    let most = 0;
    this.sizes = known.map((other) => other.size);
    this.times = known.map((other) => (most = Math.max(most, other.seconds)));
  }

  /** @param {number} size */
  seconds(size) {
    const { sizes, times } = this;
    const last = sizes.length - 1;
    const steep = last ? (times[last] - times[0]) / (sizes[last] - sizes[0]) : times[last] * SLOPE;
    let after = sizes.findIndex((known) => known > size);
    if (after < 0) return times[last] + steep * (size - sizes[last]);
    if (after === 0) {
      const slope = last ? (times[1] - times[0]) / (sizes[1] - sizes[0]) : steep;
      return Math.max((times[0] * size) / sizes[0], times[0] - slope * (sizes[0] - size));
    }
    const share = (size - sizes[after - 1]) / (sizes[after] - sizes[after - 1]);
    return times[after - 1] + share * (times[after] - times[after - 1]);
  }
}

const KEEP = 0.95, PRIOR_ROUNDS = 3;

/** How often each level of a draft was reached, if the level before was. Older rounds count less. */
export class LevelRates {
  /** @param {number[]} prior by level */
  constructor(prior) {
    this.prior = prior;
    this.tried = prior.map(() => 0);
    this.won = prior.map(() => 0);
    /** @type {number[] | null} */
    this.sums = null;
  }

  /** A round that could reach `levels` reached so many. @param {number} reached @param {number} levels */
  add(reached, levels) {
    this.prior.forEach((_, level) => {
      const tried = level <= reached && level < levels;
      this.tried[level] = KEEP * this.tried[level] + Number(tried);
      this.won[level] = KEEP * this.won[level] + Number(tried && level < reached);
    });
    this.sums = null;
  }

  /** Expected levels reached, of drafts of 1, 2, 3, ... levels. */
  get totals() {
    if (this.sums) return this.sums;
    let before = 0, product = 1, sum = 0;
    this.sums = this.prior.map((usual, level) => {
      before = (this.won[level] + PRIOR_ROUNDS * Math.max(before, usual)) / (this.tried[level] + PRIOR_ROUNDS);
      product = level ? product * before : before;
      return (sum = level ? sum + product : product);
    });
    return this.sums;
  }
}
