// Conversations, kept in this browser only. A conversation is a tree: an edited question or a second answer is a branch.

// A table of the browser's own database. The browser may evict it under an open page: it is made anew at its next use.
export class Table {
  #opened = null;

  constructor(database, name) {
    this.database = database;
    this.name = name;
  }

  all() { return this.#use("readonly", (table) => table.getAll()); }
  get(id) { return this.#use("readonly", (table) => table.get(id)); }
  put(value) { return this.#use("readwrite", (table) => table.put(value)); }
  remove(id) { return this.#use("readwrite", (table) => table.delete(id)); }

  async #use(mode, act) {
    this.#opened ??= this.#open();
    try {
      return await wish(act((await this.#opened).transaction(this.name, mode).objectStore(this.name)));
    } catch (error) {
      this.#opened = null;
      throw error;
    }
  }

  async #open() {
    const request = indexedDB.open(this.database, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(this.name, { keyPath: "id" });
    const database = await wish(request);
    database.onclose = () => { this.#opened = null; };
    return database;
  }
}

function wish(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const id = () => crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");

export function newConversation() {
  return { id: id(), title: "", system: "", updated: Date.now(), nodes: {}, leaf: "" };
}

export function add(conversation, parent, role, text) {
  const node = { id: id(), parent, role, text, at: Date.now() };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = node.at;
  if (role === "user" && !conversation.title) conversation.title = text.trim().slice(0, 80);
  return node;
}

// From the first message to the leaf that is shown.
export function path(conversation, leaf = conversation.leaf) {
  const nodes = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) nodes.unshift(node);
  return nodes;
}

export function siblings(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent).sort((a, b) => a.at - b.at);
}

// The newest leaf below a node.
export function newestLeaf(conversation, node) {
  const children = Object.values(conversation.nodes).filter((other) => other.parent === node.id).sort((a, b) => b.at - a.at);
  return children.length ? newestLeaf(conversation, children[0]) : node.id;
}

export function matches(conversation, words) {
  const text = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.text)].join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

// Whether this is a conversation, as a file that was exported has it.
export function sound(given) {
  const text = (value) => typeof value === "string";
  return given && text(given.id) && text(given.title) && text(given.system) && text(given.leaf) && typeof given.nodes === "object" &&
    Object.entries(given.nodes).every(([id, node]) => node && node.id === id && text(node.parent) && text(node.text) && ["user", "assistant"].includes(node.role));
}

export function asMarkdown(conversation) {
  const said = path(conversation).map((node) => `## ${node.role === "user" ? "You" : "Assistant"}\n\n${node.text}\n`);
  return `# ${conversation.title || "Conversation"}\n\n${said.join("\n")}`;
}
