// Conversations, kept in this browser only. A conversation is a tree: an edited question or a
// second answer is a branch.

import { wordsOf } from "./attachments.js";

// A table of the browser's own database. The browser may evict it under an open page: it is made
// anew at its next use.
export class Table {
  #opened = null;

  constructor(database, name) {
    this.database = database;
    this.name = name;
  }

  all() {
    return this.#use("readonly", (table) => table.getAll());
  }
  get(id) {
    return this.#use("readonly", (table) => table.get(id));
  }
  put(value) {
    return this.#use("readwrite", (table) => table.put(value));
  }
  remove(id) {
    return this.#use("readwrite", (table) => table.delete(id));
  }

  // Replaces a value by what `change` makes of it, in one transaction: nobody writes between. Null
  // changes nothing.
  update(id, change) {
    let changed = null;
    return this.#use("readwrite", (table) => {
      const read = table.get(id);
      read.onsuccess = () => {
        changed = change(read.result);
        if (changed) table.put(changed);
      };
    }).then(() => changed);
  }

  // The result of a request once its transaction is complete, or of none.
  async #use(mode, act) {
    this.#opened ??= this.#open();
    try {
      const transaction = (await this.#opened).transaction(this.name, mode);
      const request = act(transaction.objectStore(this.name));
      await new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error);
      });
      return request?.result;
    } catch (error) {
      this.#opened = null;
      throw error;
    }
  }

  async #open() {
    const request = indexedDB.open(this.database, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(this.name, { keyPath: "id" });
    const database = await wish(request);
    database.onclose = () => {
      this.#opened = null;
    };
    return database;
  }
}

function wish(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const id = () =>
  crypto.randomUUID?.() ??
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) =>
    b.toString(16).padStart(2, "0"),
  ).join("");

export function newConversation() {
  return { id: id(), title: "", system: "", updated: Date.now(), nodes: {}, leaf: "" };
}

export function add(conversation, parent, role, text) {
  const node = { id: id(), parent, role, text, at: Date.now() };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = node.at;
  if (role === "user" && !conversation.title) conversation.title = wordsOf(text).slice(0, 80);
  return node;
}

// From the first message to the leaf that is shown.
export function path(conversation, leaf = conversation.leaf) {
  const nodes = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) {
    nodes.push(node);
  }
  return nodes.reverse();
}

export function siblings(conversation, node) {
  return Object.values(conversation.nodes)
    .filter((other) => other.parent === node.parent)
    .sort((a, b) => a.at - b.at);
}

// The newest leaf below a node.
export function newestLeaf(conversation, node) {
  const newest = new Map(); // node id -> its newest child
  for (const other of Object.values(conversation.nodes)) {
    const known = newest.get(other.parent);
    if (!known || other.at > known.at) newest.set(other.parent, other);
  }
  let leaf = node;
  while (newest.has(leaf.id)) leaf = newest.get(leaf.id);
  return leaf.id;
}

export function matches(conversation, words) {
  const text = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.text)]
    .join("\n")
    .toLowerCase();
  return words
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

// ---- what comes from a file or from the store

const ID = /^[0-9a-f-]{8,64}$/; // as `id` makes them; no property of every object is called so
const MOST_NODES = 100_000;
const LONGEST_TITLE = 80;
const text = (value) => typeof value === "string";

// Whether this is a conversation: each node has a parent that is there, and leads to a first
// message.
export function sound(given) {
  if (
    !given ||
    ![given.id, given.title, given.system, given.leaf].every(text) ||
    !ID.test(given.id)
  ) {
    return false;
  }
  const { nodes, leaf } = given;
  if (!nodes || typeof nodes !== "object" || Array.isArray(nodes)) return false;
  const ids = Object.keys(nodes);
  if (ids.length > MOST_NODES || (leaf !== "" && !Object.hasOwn(nodes, leaf))) return false;
  return ids.every((id) => soundNode(nodes, id)) && withoutCircle(nodes, ids);
}

function soundNode(nodes, id) {
  const node = nodes[id];
  if (
    !ID.test(id) ||
    !node ||
    node.id !== id ||
    !["user", "assistant", "tool"].includes(node.role)
  ) {
    return false;
  }
  if (!text(node.text) || !text(node.parent) || !Number.isFinite(node.at)) return false;
  return node.parent === "" || Object.hasOwn(nodes, node.parent);
}

function withoutCircle(nodes, ids) {
  const rooted = new Set([""]);
  for (const id of ids) {
    const passed = new Set();
    for (let at = id; !rooted.has(at); at = nodes[at].parent) {
      if (passed.has(at)) return false;
      passed.add(at);
    }
    for (const one of passed) rooted.add(one);
  }
  return true;
}

function soundCall(call) {
  if (!call || ![call.id, call.name, call.arguments].every(text)) return false;
  return (
    call.id.length <= 128 && call.name.length <= 64 && call.arguments.length <= LONGEST_ARGUMENTS
  );
}

// The conversation of a file: what its messages say, and nothing that this page would act on, as an
// answer that is still running somewhere. Null if it is none.
export function imported(given) {
  if (!sound(given)) return null;
  const nodes = {};
  for (const { id, parent, role, at, text: said, ...more } of Object.values(given.nodes)) {
    nodes[id] = { id, parent, role, text: said, at, ...harmless(more) };
    if (role === "assistant") nodes[id].state = "done";
  }
  const { id, title, system, leaf } = given;
  const updated = Number.isFinite(given.updated) ? given.updated : Date.now();
  return { id, title: title.slice(0, LONGEST_TITLE), system, updated, nodes, leaf };
}

const MOST_CALLS = 128;
const LONGEST_ARGUMENTS = 100_000;

function harmless({ model, writer, reason, error, call, name, calls, verified, settled, usage }) {
  const kept = {};
  for (const [name_, value] of Object.entries({ model, writer, reason, error, call, name })) {
    if (text(value)) kept[name_] = value.slice(0, 300);
  }
  if (Array.isArray(calls)) {
    kept.calls = calls
      .slice(0, MOST_CALLS)
      .filter(soundCall)
      .map(({ id, name, arguments: given }) => ({ id, name, arguments: given }));
  }
  if (typeof verified === "boolean") kept.verified = verified;
  if (Number.isInteger(settled) && settled >= 0) kept.settled = settled;
  if (usage && typeof usage === "object") {
    kept.usage = Object.fromEntries(
      ["tokens", "total", "context", "speed"]
        .map((name) => [name, usage[name]])
        .filter(([, value]) => Number.isFinite(value)),
    );
  }
  return kept;
}

// ---- several writers

// Conversations that other tabs keep, too: what one of them adds stays, whatever this one writes.
// `table` is a `Table`; `writing(id)` says whether this page writes that answer just now.
export class Shelf {
  // Conversation id -> how the store had it when this page read or wrote it: { own, nodes }.
  #known = new Map();
  #gone = new Set();
  #last = Promise.resolve(); // one after the other: what is known of the store has an order

  constructor(table, writing = () => false) {
    this.table = table;
    this.writing = writing;
  }

  // All that are sound, and how many are not. Those are left as they are.
  async all() {
    const every = await this.table.all();
    const good = every.filter(sound);
    for (const one of good) this.#remember(one);
    return { conversations: good, damaged: every.length - good.length };
  }

  // The conversation that another tab has begun, or null.
  async read(id) {
    const stored = await this.table.get(id);
    if (!stored || !sound(stored)) return null;
    this.#remember(stored);
    return stored;
  }

  // Writes what has changed here, and takes in what has changed there; whether anything was
  // written.
  keep(conversation) {
    return this.#inTurn(() => this.#keep(conversation));
  }

  async #keep(conversation) {
    if (this.#gone.has(conversation.id)) return false;
    const mine = structuredClone(conversation);
    const written = await this.table.update(conversation.id, (stored) =>
      this.#merged(mine, stored),
    );
    if (written) this.#takeIn(conversation, written, mine);
    return Boolean(written);
  }

  // Takes in what has changed there; whether the conversation still exists.
  refresh(conversation) {
    return this.#inTurn(() => this.#refresh(conversation));
  }

  async #refresh(conversation) {
    const stored = await this.table.get(conversation.id);
    if (!stored || !sound(stored)) return false;
    this.#takeIn(conversation, stored);
    return true;
  }

  remove(id) {
    this.#gone.add(id);
    return this.table.remove(id);
  }

  #inTurn(act) {
    const turn = this.#last.then(act);
    this.#last = turn.catch(() => {});
    return turn;
  }

  #remember(stored) {
    const nodes = new Map(
      Object.values(stored.nodes).map((node) => [node.id, JSON.stringify(node)]),
    );
    this.#known.set(stored.id, { own: own(stored), nodes });
  }

  // Three ways: what this page changed since it read the store, and what others did.
  #merged(mine, stored) {
    const known = this.#known.get(mine.id);
    if (!stored) {
      // New, or another tab has deleted it: then only a new message brings it back.
      const hasNews = !known || Object.keys(mine.nodes).some((id) => !known.nodes.has(id));
      return hasNews ? mine : null;
    }
    if (!sound(stored)) return mine;
    const before = known ?? { own: own(stored), nodes: new Map() };
    const merged = { ...stored, nodes: { ...stored.nodes } };
    for (const name of OWN) if (mine[name] !== before.own[name]) merged[name] = mine[name];
    merged.updated = Math.max(mine.updated, stored.updated);
    const renamed = new Map();
    for (const node of Object.values(mine.nodes)) {
      const kept = this.#kept(node, stored.nodes[node.id], before.nodes.get(node.id));
      if (kept === "mine") merged.nodes[node.id] = node;
      if (kept === "both") {
        const copy = { ...node, id: id() };
        merged.nodes[copy.id] = copy;
        renamed.set(node.id, copy.id);
      }
    }
    for (const [old, copy] of renamed) follow(merged, stored, old, copy);
    return merged;
  }

  // Which state of a message is kept: this page's, the store's, or both side by side, where they
  // are two continuations of what was known, `before`.
  #kept(node, there, before) {
    const now = JSON.stringify(node);
    if (now === before) return "theirs"; // nothing has changed here
    const stored = there && JSON.stringify(there);
    const isChangedThere = there && stored !== before;
    if (!isChangedThere || stored === now || goesOn(there, node)) return "mine";
    if (goesOn(node, there) || this.writing(node.id)) return "theirs";
    return "both";
  }

  // `conversation` becomes what is `there`, but for what this page has changed since it read that,
  // or since it wrote `mine`; and the place that is shown moves only onward.
  #takeIn(conversation, there, mine = null) {
    const known = this.#known.get(there.id) ?? { own: own(conversation), nodes: new Map() };
    this.#known.set(there.id, known);
    for (const [id, node] of Object.entries(there.nodes)) {
      const here = conversation.nodes[id];
      const now = JSON.stringify(node);
      const expected = mine ? JSON.stringify(mine.nodes[id]) : known.nodes.get(id);
      if (!here) conversation.nodes[id] = structuredClone(node);
      else if (!this.writing(id) && JSON.stringify(here) === expected) replace(here, node);
      else if (now !== expected) continue; // both have changed: told apart when this page writes it
      known.nodes.set(id, now);
    }
    for (const name of OWN) {
      const expected = mine ? mine[name] : known.own[name];
      if (name !== "leaf" && conversation[name] === expected) conversation[name] = there[name];
      known.own[name] = there[name];
    }
    conversation.updated = Math.max(conversation.updated, there.updated);
    if (!conversation.leaf || path(there).some((node) => node.id === conversation.leaf)) {
      conversation.leaf = there.leaf;
    }
  }
}

// What this page has added below the message `old` stands below its `copy` from now on.
function follow(merged, stored, old, copy) {
  for (const node of Object.values(merged.nodes)) {
    const isAdded = node.parent === old && !stored.nodes[node.id];
    if (isAdded) merged.nodes[node.id] = { ...node, parent: copy };
  }
  if (merged.leaf === old) merged.leaf = copy;
}

const OWN = ["title", "system", "leaf"];
const own = (conversation) => Object.fromEntries(OWN.map((name) => [name, conversation[name]]));

// Whether `after` is a later state of the message `before`: nothing of that is lost with it.
function goesOn(before, after) {
  // Of one stream the state is later that knows of a correction before it.
  const isOneStream = (before.stream ?? "") === (after.stream ?? "");
  if (isOneStream && Boolean(before.stale) !== Boolean(after.stale)) return Boolean(after.stale);
  if (before.verified && !after.verified) return false;
  if (after.verified && !before.verified) return true;
  return after.text.startsWith(before.text);
}

// The order of its properties becomes the other's, too: texts of both are compared.
function replace(node, by) {
  for (const name of Object.keys(node)) delete node[name];
  Object.assign(node, structuredClone(by));
}

export function asMarkdown(conversation) {
  const said = path(conversation).map(messageAsMarkdown);
  return `# ${conversation.title || "Conversation"}\n\n${said.join("\n")}`;
}

function messageAsMarkdown(node) {
  const calls = (node.calls ?? []).map(callAsMarkdown);
  const parts = [node.text, ...calls].filter(Boolean);
  return `## ${speaker(node)}\n\n${parts.join("\n\n")}\n`;
}

function speaker(node) {
  if (node.role === "user") return "You";
  if (node.role === "tool") return `Result of ${node.name}`;
  return "Assistant";
}

function callAsMarkdown(call) {
  return `Calls \`${call.name}\`:\n\n\`\`\`json\n${call.arguments}\n\`\`\``;
}
