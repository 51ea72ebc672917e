// The page: conversations, settings, and the answers that are being written.

import { Answer, ChatView, verifiedText, willBeChecked } from "./chat.js";
import { Figures } from "./figures.js";
import { LOOK_SECONDS, Signs } from "./signs.js";
import { add, asMarkdown, imported, matches, newConversation, path, Shelf, Table } from "./store.js";
import { messageOf, schemaOf, structureFields, structureWords, toolsOf, Unusable } from "./structure.js";
import { ApiError, choose, chunks, ENDPOINTS, MODES, model as modelName, setLink, status as linkStatus, stop } from "./stream.js";

const $ = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const LARGEST_FILE = 256 * 1024;  // bytes of an attached text: more than a context holds
const DEFAULTS = { mode: "provisional", theme: "", max_tokens: "", temperature: "", top_p: "", top_k: "", min_p: "", stop: "", schema: "", tools: "", seed: "", endpoint: "", key: "" };

// What the embedded model can do.
const DEMO = {
  name: "demo model",
  words: "This is a small model for demonstration. It adds and subtracts, compares, sorts, counts weekdays and tells short stories. "
    + "Verified means: it is the target model's own text, which may still be wrong.",
  examples: ["What can you do?", "What is 17 + 25?", "What day is it three days after Monday?", "Write a short story about Ada, a fox and a garden."],
};
const AGAIN = 0.8;  // the temperature of another answer where none is set: the likeliest one is there already

const HERE = new URL("./", location.href).pathname;  // another page of this origin has other streams
let conversations, current, model = "", demo = false, context = 0, broken = "";
const settings = { ...DEFAULTS, ...JSON.parse(localStorage.getItem("settings") ?? "{}"), key: sessionStorage.getItem("key") ?? "" };
const running = new Map();  // node id -> { abort, node, conversation }
const shelf = new Shelf(new Table("moa-edge", "conversations"), (id) => running.has(id));
const tabs = globalThis.BroadcastChannel ? new BroadcastChannel("moa-edge") : null;  // they tell one another what has changed
const view = new ChatView($("messages"), { retry, proceed, edit, show, ask, empty, leave, results });
const figures = new Figures($("figures"));

const seconds = () => performance.now() / 1000;

function say(text) { $("status").textContent = text; }

// What must be seen: shown for a while, and said.
let noticed = 0;
function notice(text) {
  say(text);
  $("notice").textContent = text;
  $("notice").hidden = false;
  clearTimeout(noticed);
  noticed = setTimeout(() => { $("notice").hidden = true; }, 6000);
}

function empty() {
  if (broken) return { words: [`This page cannot answer: ${broken}.`], examples: [] };
  if (!model) return { words: ["Waiting for the endpoint."], examples: [] };
  const words = [`Ask ${demo ? "" : model} something. The device drafts, the verifier checks; when the link is lost, the answer goes on.`];
  return { words: demo ? [...words, DEMO.words] : words, examples: demo ? DEMO.examples : [] };
}

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
    const busy = [...running.values()].some((work) => work.conversation === conversation);
    name.append(Object.assign(document.createElement("span"), { textContent: busy ? `● ${conversation.title}` : conversation.title }));
    name.title = conversation.title;
    name.setAttribute("aria-current", String(conversation === current));
    name.addEventListener("click", () => { open(conversation); sidebar(false); });
    const more = small("⋯", `More for ${conversation.title}`, () => item.classList.toggle("opened"));
    const actions = document.createElement("div");
    actions.className = "actions";
    actions.append(small("Rename", `Rename ${conversation.title}`, () => rename(conversation)),
      small("Export", `Export ${conversation.title}`, () => save(`${slug(conversation.title)}.md`, asMarkdown(conversation), "text/markdown")),
      small("Delete", `Delete ${conversation.title}`, () => remove(conversation)));
    item.append(name, more, actions);
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

function rename(conversation) {
  const title = prompt("Title", conversation.title)?.trim();
  if (!title) return;
  conversation.title = title.slice(0, 80);
  keep(conversation);
  if (conversation === current) open(conversation);
  list();
}

async function importFile(file) {
  try {
    const given = JSON.parse(await file.text());
    const good = given.map(imported).filter(Boolean);
    const unknown = good.filter(({ id }, at) => !conversations.some((other) => other.id === id) && good.findIndex((one) => one.id === id) === at);
    conversations.push(...unknown);
    for (const conversation of unknown) await keep(conversation);
    const counts = [`${unknown.length} imported`];
    if (good.length > unknown.length) counts.push(`${good.length - unknown.length} were here already`);
    if (given.length > good.length) counts.push(`${given.length - good.length} were damaged, and left out`);
    notice(counts.join(", "));
  } catch {
    notice("This is not a file of conversations");
  }
  list();
}

async function removeAll() {
  if (!conversations.length || !confirm(`Delete all ${conversations.length} conversations?`)) return;
  for (const work of running.values()) halt(work);
  const gone = conversations;
  conversations = [];
  for (const conversation of gone) await forget(conversation);
  fresh();
}

async function remove(conversation) {
  if (!confirm(`Delete "${conversation.title}"?`)) return;
  for (const work of running.values()) if (work.conversation === conversation) halt(work);
  conversations = conversations.filter((other) => other !== conversation);
  await forget(conversation);
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
function retry(node) { answer(current, current.nodes[node.parent], { again: true }); }

// Goes on with an answer that was cut or stopped: after its verified text, so that nothing unverified becomes a part of the
// question. What was behind it is sent as what probably follows, which the verifier reads faster than it writes.
async function proceed(node) {
  const conversation = current;
  const nobodyVerifies = $("link").dataset.state === "none";
  const whole = node.text;
  const begun = nobodyVerifies ? whole : verifiedText(node);
  const rest = whole.slice(begun.length);
  Object.assign(node, { text: begun, before: begun, settled: begun.length, stream: "", reason: "", left: false, lost: false });
  delete node.verified;
  const writing = write(conversation, node, { onward: true, expected: rest });
  view.draw(node, running.get(node.id).answer, rest);
  await writing;
  if (!node.error || node.text !== begun) return;
  Object.assign(node, { text: whole, verified: begun === whole });  // nothing came: what was there is not lost
  keep(conversation);
  if (conversation === current) view.draw(node);
}

// What the calls of an answer have returned: the conversation goes on from there.
function results(node, texts) {
  let last = node;
  for (const [at, call] of node.calls.entries()) {
    last = add(current, last.id, "tool", texts[at]);
    Object.assign(last, { call: call.id, name: call.name });
  }
  answer(current, last);
}

function show(leaf) { current.leaf = leaf; keep(current); open(current); }

function answer(conversation, question, how = {}) {
  const node = add(conversation, question.id, "assistant", "");
  node.model = demo ? DEMO.name : model;
  if (conversation === current) open(conversation);
  write(conversation, node, how);
}

function request(conversation, node, { again = false, onward = false, expected = "" } = {}) {
  const said = path(conversation, onward && node.text ? node.id : node.parent);
  const empty = said.filter((one) => one.role === "assistant" && !one.text && !one.calls?.length);
  const failed = new Set(empty.flatMap((one) => [one.id, one.parent]));
  const messages = said.filter((one) => !failed.has(one.id)).map(messageOf);
  if (conversation.system) messages.unshift({ role: "system", content: conversation.system });
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, reasoning_format: "none", moa: { mode: settings.mode, resumable: true } };
  if (settings.mode === "provisional") body.moa.patience = 1;  // it is checked later in any case
  for (const name of SAMPLING) if (settings[name] !== "") body[name] = Number(settings[name]);
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  Object.assign(body, structureFields(settings.schema, settings.tools));
  if (expected) body.prediction = { type: "content", content: expected };
  if (again && !body.temperature) body.temperature = AGAIN;
  return body;
}

// Writes an answer; one with a stream's id is taken up again from its beginning.
// One tab writes an answer; others that find it unfinished wait for that. Without locks (over plain http) each of them
// follows the same stream.
const lockOf = (node) => `answer-${node.id}`;

function hold(node) {
  return new Promise((resolve) => {
    if (navigator.locks) navigator.locks.request(lockOf(node), () => new Promise((release) => { resolve(release); }));
    else resolve(() => {});
  });
}

// Goes on with an answer that was not finished when the page was closed, or with one that another tab leaves unfinished.
async function takeUp(conversation, node) {
  if (navigator.locks) {
    await navigator.locks.request(lockOf(node), () => {});
    await shelf.refresh(conversation).catch(() => {});
  }
  // One that the page closed before has no stream yet: it is asked for again.
  if (node.state === "running" && !running.has(node.id)) write(conversation, node, { onward: Boolean(node.before) });
}

async function write(conversation, node, how) {
  const held = hold(node);
  const live = new Answer(node.before);
  const work = { abort: new AbortController(), node, conversation, answer: live };
  running.set(node.id, work);
  node.state = "running";
  node.where = HERE;
  keep(conversation);
  buttons();
  list();
  say("Answering");
  const started = (id) => { node.stream = id; keep(conversation); };
  const began = node.stream ? 0 : performance.now();
  let frame = 0, last = 0, withdrawn = "";
  work.signs = new Signs(seconds());
  const draw = () => { frame = 0; if (conversation === current) view.draw(node, live, withdrawn); withdrawn = ""; };
  try {
    const body = node.stream ? null : request(conversation, node, how);
    for await (const chunk of chunks({ body, id: node.stream, key: settings.key, signal: work.abort.signal, started })) {
      const gone = live.take(chunk);
      work.signs.heard(seconds(), Boolean(gone || chunk.choices?.[0]?.delta?.content || chunk.moa?.reading));
      if (chunk.choices?.[0]?.delta?.content) last = performance.now();
      if (gone) {
        withdrawn = gone;
        if (live.verified > live.begin) notice(`${[...gone].length} characters were corrected`);  // not what only bridged the wait
      }
      if (chunk.moa?.reading) node.reading = { done: chunk.moa.reading[0], total: chunk.moa.reading[1] };
      if (chunk.moa?.link) linkState(chunk.moa.link, chunk.moa.detail);
      if (chunk.moa?.notice) notice(chunk.moa.notice);
      node.text = live.text;
      if (live.calls.length) node.calls = live.calls;
      frame ||= requestAnimationFrame(draw);
    }
    node.reason = work.halted ? "stopped" : live.reason;
    settle(node, live, began && (last - began) / 1000);
    say(work.halted ? "Stopped" : "The answer is complete");
  } catch (error) {
    node.error = error instanceof ApiError && error.status === 404 && node.stream
      ? "this answer is no longer kept: ask again" : `no answer: ${error.message}`;
    if (error.code === "context_length_exceeded") node.error += ": edit a message, or begin a new conversation";
    if (error.status === 401) {
      node.error = "no answer: an API key is needed";
      askForKey();
    }
    notice(node.error);
  }
  cancelAnimationFrame(frame);
  node.text = live.text || node.text;
  node.settled = live.settled.length;
  delete node.reading;
  node.state = "done";
  running.delete(node.id);
  keep(conversation).then(async () => (await held)());
  list();
  if (conversation === current) { view.draw(node, null, withdrawn); buttons(); }
}

// The speed is that of the writing: an answer without a verifier waits for one at its end.
function settle(node, live, writing) {
  node.verified = live.allVerified && live.verified === live.characters.length;
  node.lost = !node.verified && $("link").dataset.state === "none";  // nobody will check it
  const { completion_tokens: tokens, total_tokens: total, moa } = live.usage ?? {};
  if (tokens) node.usage = { tokens, total, context, seconds: writing || (moa?.seconds ?? 0) };
}

// Answers that the device has finished alone: the endpoint has them checked when the verifier is back, and keeps the
// corrected streams. One that is being checked just now is followed for as long as that goes on.
let checking = false;
const isMine = (node) => (node.where ?? HERE) === HERE;
const followed = new Map();  // node id -> the reading of its check: { abort, node, conversation, answer, signs, shown }

async function recheck() {
  if (checking) return;
  checking = true;
  try {
    for (const conversation of conversations) {
      for (const node of Object.values(conversation.nodes)) {
        if (willBeChecked(node) && isMine(node) && !running.has(node.id)) await follow(conversation, node);
      }
    }
  } finally {
    checking = false;
  }
}

async function follow(conversation, node) {
  const { stream } = node, live = new Answer(node.before), abort = new AbortController();
  const reading = { abort, node, conversation, answer: live, signs: new Signs(seconds()), shown: false };
  followed.set(node.id, reading);
  let shown = false, withdrawn = "", frame = 0;
  const same = () => node.stream === stream && !running.has(node.id) && !node.left;  // it may be continued meanwhile
  const draw = () => {
    frame = 0;
    if (conversation === current && same()) view.draw(node, shown ? live : null, withdrawn);
    withdrawn = "";
  };
  try {
    for await (const chunk of chunks({ id: stream, key: settings.key, signal: abort.signal })) {
      const replayed = !live.done && !shown;  // what was there before
      const before = live.verified;
      const gone = live.take(chunk);
      reading.signs.heard(seconds(), Boolean(gone || live.verified !== before || chunk.choices?.[0]?.delta?.content));
      if (replayed || !same()) continue;
      if (!shown) node.check = { checked: live.verified - live.begin, of: live.characters.length - live.begin };
      const goesOn = !shown && live.text.length > node.text.length;
      if (gone || goesOn) {
        withdrawn = gone;
        shown = reading.shown = true;
        live.done = false;
        node.check = gone ? { corrected: true } : { goesOn: true };
        notice(gone ? "The verifier corrects an answer that was written offline" : "The verifier goes on with an answer");
      }
      frame ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) node.lost = true;  // no longer kept
  }
  cancelAnimationFrame(frame);
  followed.delete(node.id);
  const told = Boolean(node.check) || shown;
  delete node.check;
  if (!same()) return;
  if (live.done && live.allVerified) {
    let common = 0;
    while (common < node.text.length && node.text[common] === live.text[common]) common++;
    if (!shown) {  // nothing was shown on the way
      withdrawn = node.text.slice(common);
      notice(withdrawn ? "The verifier has corrected an answer that was written offline" : "An answer that was written offline is verified");
    }
    node.text = live.text;
    if (live.calls.length) node.calls = live.calls;
    node.settled = live.text.length;
    node.verified = true;
    node.reason = live.reason;
    if (node.usage) node.usage = { ...node.usage, tokens: live.usage?.completion_tokens ?? node.usage.tokens, seconds: 0 };  // its speed was another text's
  } else if (shown) {  // the verifier is gone again, in the middle of its own text
    node.text = live.text;
    node.settled = live.settled.length;
    node.reason = live.reason;
  } else if (!node.lost && !told) {
    return;
  }
  if (conversation === current) view.draw(node, null, withdrawn);
  keep(conversation);
}

// The user does not wait for the check of an answer, nor the verifier for its end.
function leave(node) {
  node.left = true;
  delete node.check;
  followed.get(node.id)?.abort.abort();
  stop(node.stream, settings.key);
  view.draw(node);
  keep(current);
}

// An answer that stands still says for how long, and so does a check.
function tick() {
  for (const { node, answer: live, signs, conversation } of running.values()) {
    const words = signs.words(seconds());
    if (words === live.sign) continue;
    live.sign = words;
    if (conversation === current) view.note(node, live);
  }
  for (const { node, answer: live, signs, conversation, shown } of followed.values()) {
    const words = signs.words(seconds());
    if (!node.check || words === live.sign) continue;
    live.sign = node.check.sign = words;
    if (conversation === current) view.note(node, shown ? live : null);
  }
}

function halt(work) {
  work.halted = true;
  if (work.node.stream) stop(work.node.stream, settings.key);
  work.abort.abort();
}

async function keep(conversation) {
  try {
    if (await shelf.keep(conversation)) tabs?.postMessage({ changed: conversation.id });
  } catch {
    notice("This browser could not keep the conversation");
  }
}

async function forget(conversation) {
  await shelf.remove(conversation.id);
  tabs?.postMessage({ removed: conversation.id });
}

// What another tab has changed is taken in, and shown.
async function heard({ data }) {
  const known = conversations.find(({ id }) => id === data.changed || id === data.removed);
  if (data.removed && known && ![...running.values()].some((work) => work.conversation === known)) {
    conversations = conversations.filter((other) => other !== known);
    if (known === current) open(newConversation());
  } else if (data.changed && known) {
    const before = JSON.stringify(known);
    await shelf.refresh(known).catch(() => {});
    if (known === current && JSON.stringify(known) !== before && !document.querySelector("textarea.edit")) open(current);
  } else if (data.changed) {
    const found = await shelf.read(data.changed).catch(() => null);
    if (found && !conversations.some(({ id }) => id === found.id)) conversations.push(found);
  }
  list();
}

function mine() { return [...running.values()].filter((work) => work.conversation === current); }

function buttons() {
  const busy = mine().length > 0;
  $("stop").hidden = !busy;
  $("send").disabled = $("send").hidden = busy;
}

// ---- the link

const LINKS = {
  online: ["connected", "the verifier checks every word"],
  late: ["waiting", "no word from the verifier yet: this device goes on"],
  offline: ["offline", "the device writes alone"],
  connecting: ["connecting", ""],
  refused: ["refused", "the verifier refused this device"],
  none: ["device only", "there is no verifier: nothing is verified"],
  locked: ["key needed", "the endpoint asks for an API key: see the settings"],
  broken: ["not loaded", "the drafter could not be loaded"],
  unreachable: ["no endpoint", "the endpoint does not answer"],
};

let verifier = "";
function linkState(state, detail = "") {
  const [name, words] = LINKS[state] ?? [state, ""];
  $("link").dataset.state = state;
  $("link-text").textContent = name;
  $("link").title = [verifier, words, detail].filter(Boolean).join(": ");
}

// A text file becomes a part of the message, where it can be read and changed.
async function attach(file) {
  if (file.size > LARGEST_FILE) { notice(`${file.name} is larger than ${LARGEST_FILE / 1024} kB`); return; }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    notice(`${file.name} is no text`);
    return;
  }
  if (text.includes("\0")) { notice(`${file.name} is no text`); return; }
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  const before = $("prompt").value.trimEnd();
  $("prompt").value = `${before}${before && "\n\n"}${file.name}:\n${fence}\n${text.trimEnd()}\n${fence}\n`;
}

function askForKey() {
  if (!$("settings").open) openSettings();
  $("key").focus();
}

// Once for each time that the endpoint asks for one.
function needKey() {
  if ($("link").dataset.state === "locked") return;
  notice("An API key is needed");
  askForKey();
}

function openSettings() {
  sidebar(false);
  $("system").value = current?.system ?? "";
  $("settings").showModal();
}

// What is wrong with a field, "" for nothing.
function problemOf(check) {
  try {
    check();
    return "";
  } catch (error) {
    if (error instanceof Unusable) return error.message;
    throw error;
  }
}

// Says beside the fields what is wrong with them, and beside the message box that they are set.
function tellStructure() {
  const problems = { schema: problemOf(() => schemaOf(settings.schema)), tools: problemOf(() => toolsOf(settings.tools)) };
  for (const [name, problem] of Object.entries(problems)) {
    $(`${name}-problem`).textContent = problem;
    $(name).setAttribute("aria-invalid", String(Boolean(problem)));
  }
  const words = structureWords(settings.schema, settings.tools);
  $("structure").textContent = words;
  $("structure").hidden = !words;
}

async function look() {
  try {
    const status = await linkStatus(settings.key);
    context = status.context ?? 0;
    verifier = status.verifier ?? "";
    const about = [demo ? DEMO.name : model, verifier && `verifier ${verifier}`, status.verifier_version, context && `context of ${context} tokens`];
    $("about").textContent = about.filter(Boolean).join(" · ");
    const before = [model, broken].join();
    broken = status.link === "broken" ? status.detail : "";
    const named = status.model || model || await modelName(settings.key);
    if (named !== model || status.demo !== demo) {
      model = named;
      demo = status.demo;
      $("model").textContent = demo ? DEMO.name : model;
      $("max_tokens").placeholder = String(status.max_tokens ?? "");
    }
    if (status.link === "locked") needKey();
    if (before !== [model, broken].join() && current && !current.leaf) view.show(current);
    if (status.link === "online") recheck();
    linkState(status.link, status.detail);
    $("cut-switch").hidden = status.cut === undefined;
    $("connected").checked = !status.cut;
    $("figures").hidden = ["none", "broken"].includes(status.link);  // all of them are the verifier's
    figures.take(status, performance.now());
  } catch (error) {
    const locked = error instanceof ApiError && error.status === 401;
    if (locked) needKey();
    $("cut-switch").hidden = true;
    linkState(locked ? "locked" : "unreachable");
    figures.unknown();
  }
}

// ---- start

function sidebar(shown) { $("sidebar").classList.toggle("shown", shown); }

function bind() {
  const send = () => {
    const text = $("prompt").value;
    if (!text.trim() || mine().length) return;
    const unusable = ["schema", "tools"].find((name) => $(`${name}-problem`).textContent);
    if (unusable) {
      say(`The ${unusable} in the settings cannot be used: mend or clear it`);
      openSettings();
      $(unusable).focus();
      return;
    }
    $("prompt").value = "";
    ask(text.trim());
  };
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  $("stop").addEventListener("click", () => mine().forEach(halt));
  $("attach").addEventListener("click", () => $("attach-file").click());
  $("attach-file").addEventListener("change", async (event) => {
    const files = [...event.target.files];
    event.target.value = "";
    for (const file of files) await attach(file);
    $("prompt").focus();
  });
  $("new").addEventListener("click", () => { fresh(); sidebar(false); });
  $("search").addEventListener("input", list);
  $("export").addEventListener("click", () => save("conversations.json", JSON.stringify(conversations, null, 1), "application/json"));
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", (event) => { if (event.target.files[0]) importFile(event.target.files[0]); event.target.value = ""; });
  $("remove-all").addEventListener("click", removeAll);
  $("open-sidebar").addEventListener("click", () => { sidebar(true); $("close-sidebar").focus(); });
  document.querySelector("main").addEventListener("click", (event) => { if (event.target.id !== "open-sidebar") sidebar(false); });
  $("close-sidebar").addEventListener("click", () => sidebar(false));
  $("open-settings").addEventListener("click", openSettings);
  $("connected").addEventListener("change", async (event) => {
    await setLink(event.target.checked, settings.key).catch((error) => notice(error.message));
    look();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) { sidebar(false); mine().forEach(halt); }
    if (event.key === "k" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); sidebar(true); $("search").focus(); }
    if (event.key === "n" && event.altKey) { event.preventDefault(); fresh(); }
  });
  $("endpoint").append(...ENDPOINTS.map((address) => new Option(address)));
  if (!ENDPOINTS.includes(settings.endpoint)) settings.endpoint = ENDPOINTS[0] ?? "";
  for (const name of Object.keys(DEFAULTS)) {
    const field = $(name === "stop" ? "stop_texts" : name);  // the button is called so
    field.value = settings[name];
    field.addEventListener("change", () => {
      settings[name] = field.value;
      const { key, ...kept } = settings;
      sessionStorage.setItem("key", key);  // a key is kept no longer than this tab
      localStorage.setItem("settings", JSON.stringify(kept));
      document.documentElement.dataset.theme = settings.theme;
      tellStructure();
    });
  }
  $("structure").addEventListener("click", openSettings);
  tellStructure();
  $("system").addEventListener("change", () => { current.system = $("system").value; if (conversations.includes(current)) keep(current); });
  $("mode").parentElement.hidden = !MODES;
  $("endpoint").parentElement.hidden = ENDPOINTS.length < 2;
  $("endpoint").addEventListener("change", () => {
    $("key").value = settings.key = "";  // it was another endpoint's
    sessionStorage.removeItem("key");
    choose($("endpoint").value);
  });
  $("settings").addEventListener("close", look);
  document.documentElement.dataset.theme = settings.theme;
}

async function start() {
  const kept = await shelf.all();
  conversations = kept.conversations;
  if (kept.damaged) notice(`${kept.damaged} damaged ${kept.damaged > 1 ? "conversations are" : "conversation is"} not shown`);
  if (tabs) tabs.onmessage = heard;
  bind();
  await look();
  const wanted = conversations.find((conversation) => conversation.id === location.hash.slice(1));
  open(wanted ?? newConversation());
  $("prompt").focus();
  for (const conversation of conversations) {
    for (const node of Object.values(conversation.nodes)) {
      if (node.state === "running" && isMine(node)) takeUp(conversation, node);
    }
  }
  setInterval(() => { if (!document.hidden) look(); }, 1000);
  setInterval(tick, 1000 * LOOK_SECONDS);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
}

start();
