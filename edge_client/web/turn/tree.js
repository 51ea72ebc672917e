// The draft tree, as moa/tree.py: node 0 is the pending token, and every parent comes before its children.

/** @typedef {{tokens: number[], parents: number[], scores: number[]}} DraftTree */
/** @typedef {{breadth: number, depth: number, nodes: number, minScore: number, least: number}} TreeShape */

/** What is added to the logit of a token that must not be. */
export const MASKED = -1e9;
/** A score below this is that of a token that was masked. */
export const FORBIDDEN = MASKED / 2;

/** One guess after another. @param {number} depth @returns {TreeShape} */
export const chain = (depth) => ({ breadth: 1, depth, nodes: depth, minScore: -12, least: -Infinity });

/** Distance of every node from the root. @param {number[]} parents */
export function depths(parents) {
  /** @type {number[]} */
  const out = [];
  for (const parent of parents) out.push(parent < 0 ? 0 : out[parent] + 1);
  return out;
}

/** The tokens from node 0, which is left out, to this node. @param {{tokens: number[], parents: number[]}} tree @param {number} node */
export function pathOf(tree, node) {
  const path = [];
  for (; node > 0; node = tree.parents[node]) path.unshift(tree.tokens[node]);
  return path;
}

/** Nodes by score, the best first; of equals the first. @param {number[]} nodes @param {number[]} scores */
export const bestFirst = (nodes, scores) => nodes.sort((a, b) => (scores[b] > scores[a] ? 1 : scores[b] < scores[a] ? -1 : 0));

const ascending = (/** @type {number} */ a, /** @type {number} */ b) => a - b;

/** Grows EAGLE-2's dynamic tree level by level; the caller runs the drafter on each `frontier`. */
export class TreeGrower {
  /** @param {number} root @param {TreeShape} shape */
  constructor(root, shape) {
    this.root = root;
    this.shape = shape;
    /** Nodes to expand next. */
    this.frontier = [0];
    /** Nodes the drafter has run, in the order of its cache rows. @type {number[]} */
    this.fed = [];
    this.tokens = [root];
    this.parents = [-1];
    this.scores = [0];
    /** Depth of the frontier's nodes. */
    this.level = 0;
  }

  /** Take the drafter's best guesses after each frontier node, best first. A score that is no number is the worst.
   * @param {ArrayLike<number>[]} topTokens @param {ArrayLike<number>[]} topScores */
  expand(topTokens, topScores) {
    const { breadth, depth, minScore, least } = this.shape;
    const first = this.tokens.length;
    this.frontier.forEach((node, row) => {
      for (let i = 0; i < Math.min(breadth, topTokens[row].length); i++) {
        const score = topScores[row][i];
        if (FORBIDDEN > score && score > -Infinity) continue;
        this.tokens.push(Number(topTokens[row][i]));
        this.parents.push(node);
        this.scores.push(score < Infinity ? this.scores[node] + score : -Infinity);
      }
    });
    this.fed.push(...this.frontier);
    this.level++;
    const grown = Array.from({ length: this.tokens.length - first }, (_, i) => first + i);
    const best = bestFirst(grown, this.scores).slice(0, breadth).filter((node) => this.scores[node] >= least);
    const likely = best.reduce((sum, node) => sum + Math.exp(this.scores[node]), 0);
    this.frontier = this.level >= depth || likely < Math.exp(minScore) ? [] : best.sort(ascending);
  }

  /** The best nodes and the root. A child never outscores its parent, so the best are a tree. @returns {DraftTree} */
  tree() {
    const all = Array.from({ length: this.tokens.length - 1 }, (_, i) => i + 1);
    const order = bestFirst(all, this.scores).slice(0, this.shape.nodes);
    const likely = order.filter((node) => this.scores[node] >= this.shape.least);
    const kept = [0, ...(likely.length ? likely : order.slice(0, 1)).sort(ascending)];
    return subtree(this, kept);
  }
}

/** These nodes of a tree, each after its parent, as a tree. @param {DraftTree} tree @param {number[]} kept @returns {DraftTree} */
export function subtree(tree, kept) {
  const index = new Map(kept.map((node, i) => [node, i]));
  return {
    tokens: kept.map((node) => tree.tokens[node]),
    parents: kept.map((node) => index.get(tree.parents[node]) ?? -1),
    scores: kept.map((node) => tree.scores[node]),
  };
}
