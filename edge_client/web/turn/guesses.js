// Guesses at the text after a log, which go ahead of the answers, as moa/speculation/guess_tree.py.

import { bestFirst, pathOf } from "./tree.js";

/** @typedef {import("./tree.js").DraftTree} DraftTree */
/** @typedef {{token: number, parent: number, negLogProb: number, children: Map<number, number>}} GuessNode */

const STEP = 8, MOST = 255;

/** The nearest integer; of two the even one. @param {number} x */
export function rint(x) {
  const near = Math.round(x);
  return near - x === 0.5 && near % 2 ? near - 1 : near;
}

/** Of each node, as sent: the negative logarithm of its probability given its parent, in parts of 1/8. @param {DraftTree} tree */
export function negLogProbsOf({ scores, parents }) {
  return scores.map((score, i) => (i ? Math.min(MOST, Math.max(0, rint(-STEP * (score - scores[parents[i]])))) : 0));
}

/** A tree of guesses below the end of a growing log; bounded. */
export class GuessTree {
  constructor(most = 512) {
    this.most = most;
    /** @type {GuessNode[]} */
    this.nodes = [];
    /** Length of the log when it was last followed. */
    this.length = 0;
  }

  /** Guesses held. */
  get size() {
    return Math.max(0, this.nodes.length - 1);
  }

  clear() {
    this.nodes = [];
  }

  /** Move along the log's new tokens, and drop guesses that are not below its end. @param {number[]} log */
  follow(log) {
    let at = 0;
    for (let i = this.length; i < log.length && this.nodes.length; i++) {
      const found = this.nodes[at].children.get(log[i]);
      if (found === undefined) this.nodes = [];
      else at = found;
    }
    this.length = log.length;
    if (at && this.nodes.length) this.rootAt(at);
    if (!this.nodes.length) this.nodes.push(node(log[log.length - 1], -1, 0));
  }

  /** Add a tree whose root is the token at position `base` of the log.
   * @param {number[]} log @param {import("./messages.js").Message} guesses */
  add(log, { base, tokens, parents, neg_log_probs }) {
    this.follow(log);
    if (!(base >= 0 && base < log.length) || log[base] !== tokens[0]) return;
    // A place is a node or, if negative, a number of tokens before the log's end; null contradicts the log.
    const places = [/** @type {number | null} */ (base - log.length + 1)];
    for (let i = 1; i < tokens.length; i++) {
      const at = places[parents[i]];
      if (at === null) places.push(null);
      else if (at < 0) places.push(log[log.length + at] === tokens[i] ? at + 1 : null);
      else places.push(this.child(at, tokens[i], neg_log_probs[i]));
    }
  }

  /** Whether these tokens after the log's end were guessed, and how likely. @param {number[]} path */
  judge(path) {
    if (!this.nodes.length) return "beyond";
    let at = 0, first = true;
    for (const token of path) {
      const { children } = this.nodes[at];
      const found = children.get(token);
      if (found === undefined) return children.size ? "missed" : "beyond";
      at = found;
      for (const other of children.values()) first &&= this.nodes[at].negLogProb <= this.nodes[other].negLogProb;
    }
    return first ? "likeliest" : "branch";
  }

  /** The nodes of a tree at the log's end that are not held. @param {DraftTree} tree */
  missing(tree) {
    const places = [/** @type {number | undefined} */ (this.nodes.length ? 0 : undefined)];
    const missing = [];
    for (let i = 1; i < tree.tokens.length; i++) {
      const at = places[tree.parents[i]];
      const place = at === undefined ? undefined : this.nodes[at].children.get(tree.tokens[i]);
      places.push(place);
      if (place === undefined) missing.push(i);
    }
    return missing;
  }

  /** @param {number} at @param {number} token @param {number} negLogProb */
  child(at, token, negLogProb) {
    const known = this.nodes[at].children.get(token);
    if (known !== undefined || this.size >= this.most) return known ?? null;
    this.nodes[at].children.set(token, this.nodes.length);
    this.nodes.push(node(token, at, negLogProb));
    return this.nodes.length - 1;
  }

  /** Keep the nodes below this one; parents come before their children, so one pass is enough. @param {number} root */
  rootAt(root) {
    const index = new Map([[root, 0]]);
    const kept = [node(this.nodes[root].token, -1, 0)];
    for (let i = root + 1; i < this.nodes.length; i++) {
      const { token, parent: above, negLogProb } = this.nodes[i];
      const parent = index.get(above);
      if (parent === undefined) continue;
      index.set(i, kept.length);
      kept[parent].children.set(token, kept.length);
      kept.push(node(token, parent, negLogProb));
    }
    this.nodes = kept;
  }
}

/** @param {number} token @param {number} parent @param {number} negLogProb @returns {GuessNode} */
function node(token, parent, negLogProb) {
  return { token, parent, negLogProb, children: new Map() };
}

/** The device's tree of guesses, grown at its likeliest nodes, a few at a time. */
export class GuessTreeGrower {
  /** @param {number} root */
  constructor(root) {
    this.root = root;
    /** @type {DraftTree} */
    this.tree = { tokens: [root], parents: [-1], scores: [0] };
    this.depths = [0];
    /** Nodes that the drafter has not run. */
    this.open = new Set([0]);
  }

  /** Log-probability of the likeliest open node. */
  get likeliestOpen() {
    let best = -Infinity;
    for (const node of this.open) best = Math.max(best, this.tree.scores[node]);
    return best;
  }

  /** The likeliest open nodes. @param {number} most */
  best(most) {
    return bestFirst([...this.open], this.tree.scores).slice(0, most).sort((a, b) => a - b);
  }

  /** Take the drafter's best guesses after each of these nodes, best first.
   * @param {number[]} nodes @param {ArrayLike<number>[]} topTokens @param {ArrayLike<number>[]} topLogp */
  expand(nodes, topTokens, topLogp) {
    const { tokens, parents, scores } = this.tree;
    nodes.forEach((node, row) => {
      this.open.delete(node);
      for (let i = 0; i < topTokens[row].length; i++) {
        this.open.add(tokens.length);
        tokens.push(Number(topTokens[row][i]));
        parents.push(node);
        scores.push(scores[node] + topLogp[row][i]);
        this.depths.push(this.depths[node] + 1);
      }
    });
  }

  /** The tokens from the root, which is left out, to this node. @param {number} node */
  path(node) {
    return pathOf(this.tree, node);
  }

  /** The nodes of these tokens after the root, or null if they were not guessed. @param {number[]} path */
  find(path) {
    const [nodes, all] = this.along(path);
    return all ? nodes : null;
  }

  /** How many of these tokens after the root were guessed, and whether the next one was guessed wrong. @param {number[]} path
   * @returns {[number, boolean]} */
  won(path) {
    const [nodes] = this.along(path);
    const known = nodes.length;
    return [known, known < path.length && !this.open.has(known ? nodes[known - 1] : 0)];
  }

  /** @param {number[]} path @returns {[number[], boolean]} */
  along(path) {
    const { tokens, parents } = this.tree;
    const children = new Map();
    for (let i = 0; i < tokens.length; i++) children.set(`${parents[i]} ${tokens[i]}`, i); // of equal siblings, the last
    const nodes = [];
    let at = 0;
    for (const token of path) {
      const found = children.get(`${at} ${token}`);
      if (found === undefined) return [nodes, false];
      nodes.push((at = found));
    }
    return [nodes, true];
  }

  /** The subtree of a node as a new growth, and the earlier index of each of its nodes. @param {number} root
   * @returns {[GuessTreeGrower, number[]]} */
  below(root) {
    const { tree } = this;
    const kept = new GuessTreeGrower(tree.tokens[root]);
    const were = [root], index = new Map([[root, 0]]);
    if (!this.open.has(root)) kept.open.clear();
    for (let i = root + 1; i < tree.tokens.length; i++) {
      const parent = index.get(tree.parents[i]);
      if (parent === undefined) continue;
      index.set(i, were.length);
      if (this.open.has(i)) kept.open.add(were.length);
      were.push(i);
      kept.tree.tokens.push(tree.tokens[i]);
      kept.tree.parents.push(parent);
      kept.tree.scores.push(tree.scores[i] - tree.scores[root]);
      kept.depths.push(this.depths[i] - this.depths[root]);
    }
    return [kept, were];
  }
}
