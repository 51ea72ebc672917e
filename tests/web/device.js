// The browser's client in node. It talks by lines of JSON, and its drafter knows the answer.

import { createInterface } from "node:readline";
import { EdgeClient } from "../../edge_client/web/turn/client.js";
import { GuessTreeGrower } from "../../edge_client/web/turn/guesses.js";
import { RecordBuffer } from "../../edge_client/web/turn/records.js";
import { TreeGrower } from "../../edge_client/web/turn/tree.js";

const tell = (line) => process.stdout.write(JSON.stringify(line) + "\n");

/** As a browser's: node 20 tells only of an error where no connection was made. */
class Socket extends WebSocket {
  constructor(...where) {
    super(...where);
    this.addEventListener("error", () => this.onclose?.({ code: 1006, reason: "" }));
  }
}

/** Right at this rate, by the length of the text; and often wrong in a way that the second guess is not. */
class Oracle {
  runTokens = 1;

  constructor({ truth, right, seed, heads }) {
    Object.assign(this, { truth, right, seed });
    this.records = heads ? new RecordBuffer(heads) : null;
  }

  top(ids) {
    const chance = (salt) => {
      let mixed = Math.imul(ids.length * 31 + ids[ids.length - 1] + salt, 0x9e3779b1) ^ this.seed;
      mixed = Math.imul(mixed ^ (mixed >>> 15), 0x85ebca6b);
      return ((mixed ^ (mixed >>> 13)) >>> 0) / 2 ** 32;
    };
    const others = [1, 2, 3].map((salt) => 4 + Math.floor(124 * chance(salt)));
    const known = ids.length < this.truth.length && ids.every((id, i) => id === this.truth[i]);
    if (known) others.splice(chance(9) < this.right ? 0 : 1, 0, this.truth[ids.length]);
    return [others.slice(0, 3), [0.7, 0.2, 0.1].map(Math.log)];
  }

  async *draft(ids, shape) {
    const grower = new TreeGrower(ids[ids.length - 1], shape);
    while (grower.frontier.length) {
      const top = grower.frontier.map((node) => this.top([...ids, ...path(grower, node)]));
      grower.expand(top.map(([tokens]) => tokens), top.map(([, scores]) => scores));
      yield;
    }
    return grower.tree();
  }

  async *grow(ids, breadth) {
    if (this.growth?.length !== ids.length) this.growth = { length: ids.length, tree: new GuessTreeGrower(ids[ids.length - 1]) };
    const { tree } = this.growth, nodes = tree.best(breadth);
    const top = nodes.map((node) => this.top([...ids, ...tree.path(node)]));
    tree.expand(nodes, top.map(([tokens]) => tokens), top.map(([, scores]) => scores));
    return tree;
  }

  async *guess(ids) {
    return this.top(ids)[0][0];
  }
}

function path({ tokens, parents }, node) {
  return node ? [...path({ tokens, parents }, parents[node]), tokens[node]] : [];
}

/** A turn, or the rest of an interrupted one; and then what is left to check. */
async function turn({ conversation }, { id, ids, changes, checks }) {
  const all = async (events) => {
    for await (const event of events) tell({ turn: id, event });
  };
  await all(ids ? conversation.generate(ids, changes) : conversation.resume());
  for (let i = 0; i < checks && conversation.unverified; i++) await all(conversation.recheck());
  tell({ turn: id, over: true });
}

const devices = new Map();
// Each line is a task of its own, as a page's messages are: in a loop that awaits lines, a snapshot could be taken while
// an event is on its way to its reader.
createInterface({ input: process.stdin }).on("line", (line) => {
  const ask = JSON.parse(line);
  if (ask.device) {
    const { verifier, settings, oracle, identities, eosIds, snapshot } = ask.device;
    const device = {
      newDrafter: () => new Oracle(oracle),
      decode: (ids) => ids.map((id) => String.fromCharCode(0x4e00 + id)).join(""),
      eosIds,
      maxPositions: 160,
      calibration: null,
    };
    const client = new EdgeClient({ verifier, identities, device, settings, environment: { WebSocket: Socket } });
    client.open();
    devices.set(ask.id, { client, conversation: client.conversation(snapshot) });
  } else if (ask.checks !== undefined) turn(devices.get(ask.id), ask);
  else if (ask.snapshot) tell({ turn: ask.id, snapshot: devices.get(ask.id).conversation.snapshot() });
  else if (ask.cancel) devices.get(ask.id).conversation.cancel();
  else if (ask.end) {
    const { client, conversation } = devices.get(ask.id);
    conversation.close();
    client.close();
    devices.delete(ask.id);
  }
});
