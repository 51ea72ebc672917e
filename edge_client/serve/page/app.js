// The page: conversations, settings, and the answers that are being written.

import { Answer, ChatView } from "./chat.js";
import { Figures } from "./figures.js";
import { add, asMarkdown, matches, newConversation, path, Store } from "./store.js";
import { ApiError, chunks, get, post, stop } from "./stream.js";

const $ = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "max_tokens", "seed"];
const DEFAULTS = { mode: "provisional", theme: "", max_tokens: "", temperature: "", top_p: "", seed: "", key: "" };

let store, conversations, current, model = "";
const settings = { ...DEFAULTS, ...JSON.parse(localStorage.getItem("settings") ?? "{}"), key: sessionStorage.getItem("key") ?? "" };
const running = new Map();  // node id -> { abort, node, conversation }
const view = new ChatView($("messages"), { retry, edit, show, copied: () => say("Copied") });
const figures = new Figures($("figures"));

function say(text) { $("status").textContent = text; }

// ---- conversations

function open(conversation) {
  current = conversation;
  location.hash = conversation.id;
  $("title").textContent = conversation.title || "New conversation";
  document.title = conversation.title ? `${conversation.title} · moa-edge` : "moa-edge";
  view.show(conversation);
  for (const { node, answer, conversation: owner } of running.values()) if (owner === conversation) view.draw(node, answer);
  list();
  buttons();
}

function list() {
  const words = $("search").value.trim();
  const found = conversations.filter((c) => c.title && (!words || matches(c, words))).sort((a, b) => b.updated - a.updated);
  $("conversations").replaceChildren(...found.map((conversation) => {
    const item = document.createElement("li");
    const name = document.createElement("button");
    name.className = "open";
    name.textContent = conversation.title;
    name.setAttribute("aria-current", String(conversation === current));
    name.addEventListener("click", () => { open(conversation); sidebar(false); });
    item.append(name, small("⤓", `Export ${conversation.title}`, () => save(`${slug(conversation.title)}.md`, asMarkdown(conversation), "text/markdown")),
      small("✕", `Delete ${conversation.title}`, () => remove(conversation)));
    return item;
  }));
}

function small(text, label, act) {
  const made = document.createElement("button");
  made.className = "small";
  made.textContent = text;
  made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

async function remove(conversation) {
  if (!confirm(`Delete "${conversation.title}"?`)) return;
  for (const work of running.values()) if (work.conversation === conversation) halt(work);
  conversations = conversations.filter((other) => other !== conversation);
  await store.remove(conversation.id);
  if (conversation === current) fresh();
  list();
}

function fresh() {
  open(newConversation());
  $("prompt").focus();
}

const slug = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 40) || "conversation";

function save(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// ---- answers

function ask(text) {
  if (!conversations.includes(current)) conversations.push(current);
  const leaf = current.leaf;
  answer(current, add(current, leaf, "user", text));
  $("title").textContent = current.title;
}

function edit(node, text) { answer(current, add(current, node.parent, "user", text)); }
function retry(node) { answer(current, current.nodes[node.parent]); }
function show(leaf) { current.leaf = leaf; keep(current); open(current); }

function answer(conversation, question) {
  const node = add(conversation, question.id, "assistant", "");
  if (conversation === current) open(conversation);
  write(conversation, node);
}

function request(conversation, node) {
  const messages = path(conversation, node.parent).map(({ role, text }) => ({ role, content: text }));
  if (conversation.system) messages.unshift({ role: "system", content: conversation.system });
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, moa: { mode: settings.mode, resumable: true } };
  for (const name of SAMPLING) if (settings[name] !== "") body[name] = Number(settings[name]);
  return body;
}

// Writes an answer; one with a stream's id is taken up again from its beginning.
async function write(conversation, node) {
  const live = new Answer();
  const work = { abort: new AbortController(), node, conversation, answer: live };
  running.set(node.id, work);
  node.state = "running";
  buttons();
  say("Answering");
  const body = node.stream ? null : request(conversation, node);
  const started = (id) => { node.stream = id; keep(conversation); };
  let frame = 0, withdrawn = "";
  const draw = () => { frame = 0; if (conversation === current) view.draw(node, live, withdrawn); withdrawn = ""; };
  try {
    for await (const chunk of chunks({ body, id: node.stream, key: settings.key, signal: work.abort.signal, started })) {
      const gone = live.take(chunk);
      if (gone) { withdrawn = gone; say(`${[...gone].length} characters were corrected`); }
      if (chunk.moa?.link) linkState(chunk.moa.link, chunk.moa.detail);
      if (chunk.moa?.notice) say(chunk.moa.notice);
      node.text = live.text;
      frame ||= requestAnimationFrame(draw);
    }
    node.reason = work.halted ? "stopped" : live.reason;
    node.verified = live.allVerified && live.verified === live.characters.length;
    say(work.halted ? "Stopped" : "The answer is complete");
  } catch (error) {
    node.error = error instanceof ApiError && error.status === 404 && node.stream
      ? "this answer is no longer kept: ask again" : `no answer: ${error.message}`;
    if (error instanceof ApiError && error.status === 401) $("settings").showModal();
    say(node.error);
  }
  cancelAnimationFrame(frame);
  node.text = live.text || node.text;
  node.settled = live.settled.length;
  node.state = "done";
  running.delete(node.id);
  keep(conversation);
  if (conversation === current) { view.draw(node, null, withdrawn); buttons(); }
}

function halt(work) {
  work.halted = true;
  if (work.node.stream) stop(work.node.stream, settings.key);
  work.abort.abort();
}

function keep(conversation) {
  const copy = structuredClone(conversation);
  return store.put(copy).catch(() => say("This browser could not keep the conversation"));
}

function mine() { return [...running.values()].filter((work) => work.conversation === current); }

function buttons() {
  const busy = mine().length > 0;
  $("stop").hidden = !busy;
  $("send").disabled = busy;
}

// ---- the link

function linkState(state, detail = "") {
  const names = { online: "verified", late: "waiting for the verifier", offline: "offline: the device writes alone",
    connecting: "connecting", refused: "the verifier refused", none: "device only", unreachable: "the endpoint is not running" };
  $("link").dataset.state = state;
  $("link-text").textContent = names[state] ?? state;
  $("link").title = detail;
}

async function look() {
  try {
    if (!model) model = (await get("/v1/models", settings.key)).data[0].id;
    const status = await get("/moa/status", settings.key);
    linkState(status.link, status.detail);
    $("cut-switch").hidden = status.cut === undefined;
    $("connected").checked = !status.cut;
    figures.take(status, performance.now());
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) say("An API key is needed: see the settings");
    linkState(error instanceof ApiError ? "refused" : "unreachable", error.message);
  }
}

// ---- start

function sidebar(shown) { $("sidebar").classList.toggle("shown", shown); }

function bind() {
  const send = () => {
    const text = $("prompt").value;
    if (!text.trim() || mine().length) return;
    $("prompt").value = "";
    ask(text.trim());
  };
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  $("stop").addEventListener("click", () => mine().forEach(halt));
  $("new").addEventListener("click", () => { fresh(); sidebar(false); });
  $("search").addEventListener("input", list);
  $("export").addEventListener("click", () => save("conversations.json", JSON.stringify(conversations, null, 1), "application/json"));
  $("open-sidebar").addEventListener("click", () => { sidebar(true); $("search").focus(); });
  $("close-sidebar").addEventListener("click", () => sidebar(false));
  $("open-settings").addEventListener("click", () => { sidebar(false); $("system").value = current.system; $("settings").showModal(); });
  $("connected").addEventListener("change", async (event) => {
    await post("/moa/link", { connected: event.target.checked }, settings.key).catch((error) => say(error.message));
    look();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) mine().forEach(halt);
    if (event.key === "k" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); sidebar(true); $("search").focus(); }
    if (event.key === "n" && event.altKey) { event.preventDefault(); fresh(); }
  });
  for (const name of Object.keys(DEFAULTS)) {
    $(name).value = settings[name];
    $(name).addEventListener("change", () => {
      settings[name] = $(name).value;
      const { key, ...kept } = settings;
      sessionStorage.setItem("key", key);  // a key is kept no longer than this tab
      localStorage.setItem("settings", JSON.stringify(kept));
      document.documentElement.dataset.theme = settings.theme;
    });
  }
  $("system").addEventListener("change", () => { current.system = $("system").value; if (conversations.includes(current)) keep(current); });
  $("settings").addEventListener("close", look);
  document.documentElement.dataset.theme = settings.theme;
}

async function start() {
  store = await Store.open();
  conversations = await store.all();
  bind();
  await look();
  const wanted = conversations.find((conversation) => conversation.id === location.hash.slice(1));
  open(wanted ?? newConversation());
  for (const conversation of conversations) {
    for (const node of Object.values(conversation.nodes)) {
      if (node.state !== "running") continue;
      if (node.stream) { write(conversation, node); } else { node.state = "done"; node.error = "the page closed before the answer began: ask again"; }
    }
  }
  setInterval(() => { if (!document.hidden) look(); }, 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  if ("serviceWorker" in navigator) {
    const trusted = globalThis.trustedTypes?.createPolicy("service-worker", { createScriptURL: (address) => address });
    navigator.serviceWorker.register(trusted ? trusted.createScriptURL("sw.js") : "sw.js").catch(() => {});
  }
}

start();
