// The page: conversations, settings, and the answers that are being written.

import { asBlock, filesOf, textOf, Unattachable } from "./attachments.js";
import {
  Answer,
  button,
  ChatView,
  element,
  verifiedText,
  willBeAskedAgain,
  willBeChecked,
} from "./chat.js";
import { Figures } from "./figures.js";
import { checkedBy, LOOK_SECONDS, refuses, said, Signs, troubleOf } from "./signs.js";
import {
  add,
  asMarkdown,
  imported,
  matches,
  newConversation,
  path,
  Shelf,
  Table,
} from "./store.js";
import {
  messageOf,
  schemaOf,
  standing,
  structureFields,
  structureWords,
  toolsOf,
  Unusable,
} from "./structure.js";
import {
  ApiError,
  choose,
  chunks,
  count,
  ENDPOINTS,
  MODES,
  model as modelName,
  SAME_AGAIN,
  setLink,
  status as linkStatus,
  stop,
} from "./stream.js";

const $ = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const DEFAULTS = {
  mode: "provisional",
  theme: "",
  max_tokens: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  stop: "",
  schema: "",
  tools: "",
  tool_choice: "",
  seed: "",
  endpoint: "",
  key: "",
};

// What the embedded model can do.
const DEMO = {
  name: "demo model",
  words: "Verified means: it is the target model's own text, which may still be wrong.",
  examples: [
    "What can you do?",
    "What is 17 + 25?",
    "What day is it three days after Monday?",
    "Write a short story about Ada, a fox and a garden.",
  ],
};
// The temperature of another answer where none is set: the likeliest one is there already.
const AGAIN = 0.8;

const HERE = new URL("./", location.href).pathname; // another page of this origin has other streams
let conversations; // all of them
let current; // the one on the screen
let model = ""; // whose text the endpoint gives
let demo = false; // whether that is the embedded model
let toy = []; // what is said of it
let context = 0; // tokens that it holds
let broken = ""; // why this page cannot answer
const settings = {
  ...DEFAULTS,
  ...JSON.parse(localStorage.getItem("settings") ?? "{}"),
  key: sessionStorage.getItem("key") ?? "",
};
const running = new Map(); // node id -> its work, as `beginWork` makes it
const shelf = new Shelf(new Table("moa-edge", "conversations"), (id) => running.has(id));
// The page's tabs tell one another what has changed.
const tabs = globalThis.BroadcastChannel ? new BroadcastChannel("moa-edge") : null;
const view = new ChatView($("messages"), {
  retry,
  proceed,
  edit,
  show,
  ask,
  empty,
  leave,
  results,
  nobodyVerifies: () => nobodyVerifies(),
});
const figures = new Figures($("figures"));

const seconds = () => performance.now() / 1000;

function say(text) {
  $("status").textContent = text;
}

// Shown for a while, and said.
let noticed = 0;
function notice(text) {
  say(text);
  $("notice").textContent = text;
  $("notice").hidden = false;
  clearTimeout(noticed);
  noticed = setTimeout(() => {
    $("notice").hidden = true;
  }, 6000);
}

// In a conversation without messages.
function empty() {
  if (broken) return { words: [`This page cannot answer: ${broken}.`], examples: [] };
  if (!model) return { words: ["Waiting for the endpoint."], examples: [] };
  const how = "The device drafts, the verifier checks; when the link is lost, the answer goes on.";
  const about = toy.map((text) => text[0].toUpperCase() + text.slice(1));
  if (!demo) return { words: [`Ask ${model} something. ${said(how)}`], about, examples: [] };
  return { words: [`Ask something. ${how}`, DEMO.words], about, examples: DEMO.examples };
}

// ---- conversations

function open(conversation) {
  current = conversation;
  location.hash = conversation.id;
  $("title").textContent = conversation.title || "New conversation";
  document.title = conversation.title ? `${conversation.title} · moa-edge` : "moa-edge";
  view.show(conversation);
  for (const { node, answer, conversation: owner } of running.values()) {
    if (owner === conversation) view.draw(node, answer);
  }
  list();
  buttons();
}

// The list of conversations that match the search, the latest first.
function list() {
  const words = $("search").value.trim();
  const found = conversations.filter((one) => one.title && (!words || matches(one, words)));
  found.sort((a, b) => b.updated - a.updated);
  $("conversations").replaceChildren(...found.map(listItem));
}

function listItem(conversation) {
  const { title } = conversation;
  const isBusy = [...running.values()].some((work) => work.conversation === conversation);
  const name = element("button", "open");
  name.title = title;
  name.setAttribute("aria-current", String(conversation === current));
  name.append(element("span", "", isBusy ? `● ${title}` : title));
  name.addEventListener("click", () => {
    open(conversation);
    sidebar(false);
  });
  const item = element("li");
  const more = small("⋯", `More for ${title}`, () => item.classList.toggle("opened"));
  const actions = element("div", "actions");
  const exported = () => save(`${slug(title)}.md`, asMarkdown(conversation), "text/markdown");
  actions.append(
    small("Rename", `Rename ${title}`, () => rename(conversation)),
    small("Export", `Export ${title}`, exported),
    small("Delete", `Delete ${title}`, () => remove(conversation)),
  );
  item.append(name, more, actions);
  return item;
}

function small(text, label, act) {
  const made = button(text, label, act);
  made.className = "small";
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
    const here = new Set(conversations.map(({ id }) => id));
    const unknown = [];
    for (const conversation of good) {
      if (here.has(conversation.id)) continue;
      here.add(conversation.id); // a file may have it twice
      unknown.push(conversation);
    }
    conversations.push(...unknown);
    for (const conversation of unknown) await keep(conversation);
    const counts = [`${unknown.length} imported`];
    if (good.length > unknown.length) {
      counts.push(`${good.length - unknown.length} were here already`);
    }
    if (given.length > good.length) {
      counts.push(`${given.length - good.length} were damaged, and left out`);
    }
    notice(counts.join(", "));
  } catch {
    notice("This is not a file of conversations");
  }
  list();
}

async function removeAll() {
  if (!conversations.length || !confirm(`Delete all ${conversations.length} conversations?`)) {
    return;
  }
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

const slug = (title) =>
  title
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .slice(0, 40) || "conversation";

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

function edit(node, text) {
  answer(current, add(current, node.parent, "user", text));
}
function retry(node) {
  answer(current, current.nodes[node.parent], { again: true });
}

// Goes on with an answer that was cut or stopped: after its verified text, so that nothing
// unverified becomes a part of the question. What was behind it is sent as what probably follows,
// which the verifier reads faster than it writes.
async function proceed(node) {
  const conversation = current;
  const { text: whole, stale, verified, usage, reason, settled, lost } = node;
  const sure = verifiedText(node);
  const begun = nobodyVerifies() ? whole : sure;
  if (!begun) delete node.stale; // it is written anew
  const rest = whole.slice(begun.length);
  Object.assign(node, {
    text: begun,
    before: begun,
    settled: sure.length,
    stream: "",
    reason: "",
    left: false,
    lost: false,
  });
  delete node.verified;
  delete node.error;
  const writing = write(conversation, node, { onward: true, expected: rest });
  view.draw(node, running.get(node.id).answer, rest);
  await writing;
  if (!node.text.startsWith(whole) && !node.error) withdraw(conversation, node);
  if (!(node.error || node.lost) || node.text !== begun) return;
  // Nothing came: what was there is not lost, and can be gone on with another time.
  Object.assign(node, { text: whole, verified, usage, reason, settled, lost });
  if (stale) node.stale = true;
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

function show(leaf) {
  current.leaf = leaf;
  keep(current);
  open(current);
}

function answer(conversation, question, how = {}) {
  const node = add(conversation, question.id, "assistant", "");
  node.model = demo ? DEMO.name : model;
  if (conversation === current) open(conversation);
  write(conversation, node, how);
}

// The body of the request for an answer. `again`: another one than is there; `onward`: the rest of
// one that has begun; `expected`: what it probably says.
function request(conversation, node, { again = false, onward = false, expected = "" } = {}) {
  const last = onward && node.text ? node.id : node.parent;
  const messages = messagesOf(conversation, last);
  const mode = node.earlier ? "provisional" : settings.mode; // its old text is there anyway
  const moa = { mode, resumable: true };
  if (mode === "provisional") moa.patience = 1; // it is checked later in any case
  const body = {
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    reasoning_format: "none",
    moa,
    ...samplingFields(),
    ...structureFields(settings.schema, settings.tools),
  };
  // A call can be demanded of the answer to a question; behind its results the answer is wanted.
  const isQuestion = messages.at(-1)?.role === "user";
  if (body.tools && settings.tool_choice && isQuestion) body.tool_choice = settings.tool_choice;
  if (expected) body.prediction = { type: "content", content: expected };
  if (again && !body.temperature) body.temperature = AGAIN;
  return body;
}

// What was said up to this message; questions that got no answer are left out with it.
function messagesOf(conversation, last) {
  const said = path(conversation, last);
  const unanswered = new Set();
  for (const one of said) {
    const { text, calls } = standing(one);
    if (one.role !== "assistant" || text || calls?.length) continue;
    unanswered.add(one.id);
    unanswered.add(one.parent);
  }
  const messages = said.filter((one) => !unanswered.has(one.id)).map(messageOf);
  if (conversation.system) messages.unshift({ role: "system", content: conversation.system });
  return messages;
}

function samplingFields() {
  const fields = {};
  for (const name of SAMPLING) {
    if (settings[name] !== "") fields[name] = Number(settings[name]);
  }
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  return fields;
}

// ---- writing an answer

// One tab writes an answer; others that find it unfinished wait for that. Without locks (over plain
// http) each of them follows the same stream.
const lockOf = (node) => `answer-${node.id}`;

// Resolves, when this tab has the answer's lock, to what gives it back.
function hold(node) {
  return new Promise((resolve) => {
    if (!navigator.locks) {
      resolve(() => {});
      return;
    }
    const untilReleased = () => new Promise((release) => resolve(release));
    navigator.locks.request(lockOf(node), untilReleased);
  });
}

// Goes on with an answer that was not finished when the page was closed, or with one that another
// tab leaves unfinished.
async function takeUp(conversation, node) {
  if (navigator.locks) {
    await navigator.locks.request(lockOf(node), () => {});
    await shelf.refresh(conversation).catch(() => {});
  }
  if (node.state !== "running" || running.has(node.id)) return;
  // One that the page closed before has no stream yet: it is asked for again.
  write(conversation, node, {
    onward: Boolean(node.before),
    expected: node.earlier?.text ?? "",
  });
}

// Writes an answer; one with a stream's id is taken up again from its beginning.
async function write(conversation, node, how) {
  const release = hold(node);
  const work = beginWork(conversation, node);
  try {
    await readAnswer(work, how);
    settle(work);
  } catch (error) {
    if (isForgotten(error, node)) cutOff(work);
    else tellFailure(error, node);
  }
  finishWork(work);
  // Other tabs may have it when it is stored.
  await keep(conversation);
  (await release)();
  // The stream did not come to say how long it is, or it says that of its own part.
  if (work.halted || node.before) await measure(conversation, node);
}

function tellFailure(error, node) {
  node.error = failureOf(error, node);
  if (error.status === 401) askForKey();
  notice(node.error);
}

// Whether the endpoint has no stream of this answer any more, of which there is text here: it was
// started anew, or kept it no longer.
function isForgotten(error, node) {
  return error instanceof ApiError && error.status === 404 && node.stream && node.text;
}

// The text stays, verified as far as it was, and can be gone on with.
function cutOff({ node }) {
  Object.assign(node, { reason: "lost", verified: false, lost: true });
  notice("The endpoint has forgotten the rest of this answer: Continue goes on");
}

// How long an answer is, all of it.
async function measure(conversation, node) {
  const { text } = node;
  const tokens = text && (await count(text, settings.key).catch(() => 0));
  if (!tokens || node.usage?.tokens || node.text !== text || running.has(node.id)) return;
  node.usage = { ...node.usage, tokens };
  if (conversation === current) view.note(node);
  keep(conversation);
}

function beginWork(conversation, node) {
  delete node.usage; // of what it said before
  const work = {
    conversation,
    node,
    answer: new Answer(node.before, node.settled),
    abort: new AbortController(),
    signs: new Signs(seconds()),
    halted: false, // by the user
    beganAt: node.stream ? null : seconds(), // null: before this page was opened
    textAt: null, // when the latest text came
    withdrawn: "", // since the screen was drawn
    differs: false, // from what it said before, where it is asked again
    frame: 0, // the request for the next drawing
  };
  running.set(node.id, work);
  node.state = "running";
  node.where = HERE;
  keep(conversation);
  buttons();
  list();
  say("Answering");
  drawWork(work); // it is busy before its first word
  return work;
}

async function readAnswer(work, how) {
  const { node, conversation, abort } = work;
  const body = node.stream ? null : request(conversation, node, how);
  const started = (id) => {
    node.stream = id;
    keep(conversation);
  };
  const asked = { body, id: node.stream, key: settings.key, signal: abort.signal, started };
  for await (const chunk of chunks(asked)) {
    takeText(work, chunk);
    takeNews(work, chunk.moa ?? {});
    work.frame ||= requestAnimationFrame(() => drawWork(work));
  }
}

// What a chunk adds to the text, and withdraws of it.
function takeText(work, chunk) {
  const { node, answer: live } = work;
  const withdrawn = live.take(chunk);
  const isLonger = Boolean(chunk.choices?.[0]?.delta?.content);
  work.signs.heard(seconds(), isLonger || withdrawn);
  if (isLonger) work.textAt = seconds();
  if (withdrawn) {
    work.withdrawn = withdrawn;
    // Before the first verified character it only bridged the wait: that is no news.
    if (live.verified > live.begin) notice(`${[...withdrawn].length} characters were corrected`);
  }
  node.text = live.text;
  node.settled = live.settled.length;
  if (live.calls.length) node.calls = live.calls;
  const before = node.earlier?.text ?? "";
  if (!before || work.differs || before.startsWith(live.text)) return;
  work.differs = true;
  work.withdrawn = behindCommon(before, live.text);
}

// What of `before` is no longer said.
function behindCommon(before, after) {
  let common = 0;
  while (common < before.length && before[common] === after[common]) common++;
  return before.slice(common);
}

// What a chunk tells beside the text.
function takeNews(work, news) {
  const { node, answer: live } = work;
  if (news.reading) {
    const [done, total] = news.reading;
    const before = node.reading?.done;
    node.reading = { done, total };
    // Without progress it is said again, as a sign of life.
    if (before !== done && live.awaits(node.reading)) {
      work.signs.heard(seconds(), true);
      work.beganAt &&= work.readAt ?? work.beganAt; // only its last step is writing
      work.readAt = seconds();
    }
  }
  if (news.link) linkState(news.link, news.detail);
  if (news.link === "refused") notice(said(`The verifier refuses: ${news.detail}`));
  if (news.notice) notice(news.notice);
}

function drawWork(work) {
  work.frame = 0;
  if (work.conversation === current) view.draw(work.node, work.answer, work.withdrawn);
  work.withdrawn = "";
}

// The answer has ended: why, what of it is verified, and its figures.
function settle({ node, answer: live, halted, beganAt, textAt }) {
  node.reason = halted ? "stopped" : live.reason;
  node.verified = live.isSettled;
  node.lost = !node.verified && nobodyVerifies();
  say(halted ? "Stopped" : "The answer has ended");
  const { completion_tokens: tokens, total_tokens: total, moa } = live.usage ?? {};
  if (!tokens) return;
  // The speed is that of the writing: an answer without a verifier waits for one at its end.
  const writing = beganAt && textAt ? textAt - beganAt : (moa?.seconds ?? 0);
  node.usage = { total, context, speed: writing > 0 ? tokens / writing : 0 };
  if (!node.before) node.usage.tokens = tokens; // else it is the length of the rest
}

// Why there is no answer, or no more of it, and what to do.
function failureOf(error, node) {
  if (error.status === 401) return "no answer: an API key is needed";
  if (error instanceof ApiError && error.status === 404 && node.stream) {
    return "this answer is no longer kept: ask again";
  }
  const failure = `no answer: ${error.message}`;
  if (error.code !== "context_length_exceeded") return failure;
  return `${failure}: edit a message, or begin a new conversation`;
}

function finishWork(work) {
  const { node, conversation, answer: live, frame } = work;
  cancelAnimationFrame(frame);
  if (live.text) {
    node.text = live.text;
    node.settled = live.settled.length;
  }
  delete node.reading;
  node.state = "done";
  running.delete(node.id);
  if (node.earlier) endAgain(work);
  if (node.stale) notVerified(node); // an answer before it was corrected meanwhile
  list();
  const { withdrawn } = work;
  if (conversation !== current) return;
  view.draw(node, null, withdrawn);
  buttons();
}

// ---- the check of answers that the device has finished alone

// The endpoint has them checked when the verifier is back, and keeps the corrected streams. One
// that is being checked just now is followed for as long as that goes on.
const isMine = (node) => (node.where ?? HERE) === HERE;
const followed = new Map(); // node id -> its check, as `follow` makes it
let checking = false; // whether one of them is followed

async function recheck() {
  if (checking) return;
  checking = true;
  try {
    for (const conversation of conversations) {
      const nodes = Object.values(conversation.nodes).sort((a, b) => a.at - b.at);
      for (const node of nodes) {
        if (!isMine(node) || running.has(node.id)) continue;
        if (willBeChecked(node) && isTimely(node.stream)) await follow(conversation, node);
        else if (isDue(conversation, node)) await askAgain(conversation, node);
      }
    }
  } finally {
    checking = false;
  }
}

// Streams that were followed: when, since when nothing new has come of them, and how many chunks
// they had.
const looks = new Map();
const LONGEST_PAUSE = 5; // a check may begin late, where another one goes before it
let onlineAt = 0;

// Whether this stream is to be read: the longer nothing was new, the more rarely.
function isTimely(stream) {
  const { at, newAt } = looks.get(stream) ?? { at: 0, newAt: 0 };
  const still = at - Math.max(newAt, onlineAt);
  return seconds() - at >= Math.min(LONGEST_PAUSE, still / 4);
}

function looked({ stream, had, known }) {
  const at = seconds();
  const newAt = had > known ? at : (looks.get(stream)?.newAt ?? at);
  looks.set(stream, { at, newAt, had });
}

async function follow(conversation, node) {
  const check = {
    conversation,
    node,
    stream: node.stream,
    answer: new Answer(node.before),
    abort: new AbortController(),
    signs: new Signs(seconds()),
    shown: false, // whether the text on the screen is that of the check
    corrected: false, // whether anything was withdrawn
    withdrawn: "", // since the screen was drawn
    frame: 0, // the request for the next drawing
    had: 0, // chunks that have come
    known: looks.get(node.stream)?.had ?? 0, // those that had come before
  };
  const before = content(node);
  followed.set(node.id, check);
  try {
    const asked = { id: check.stream, key: settings.key, signal: check.abort.signal };
    for await (const chunk of chunks(asked)) takeCheck(check, chunk);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) node.lost = true; // no longer kept
  }
  cancelAnimationFrame(check.frame);
  followed.delete(node.id);
  looked(check);
  const wasTold = Boolean(node.check) || check.shown;
  delete node.check;
  if (!isWanted(check)) return;
  const hasEnded = endCheck(check);
  if (!hasEnded && !node.lost && !wasTold) return; // nothing has changed
  if (content(node) !== before) withdraw(conversation, node);
  if (conversation === current) view.draw(node, null, check.withdrawn);
  keep(conversation);
  if (node.before) await measure(conversation, node);
}

// Whether this check is of the text that is there: it may be continued meanwhile.
function isWanted({ node, stream }) {
  return node.stream === stream && !running.has(node.id) && !node.left && !node.stale;
}

function takeCheck(check, chunk) {
  const { node, answer: live } = check;
  // What was there before.
  const isKnown = SAME_AGAIN && ++check.had <= check.known;
  const isReplay = (isKnown || !live.done) && !check.shown;
  const before = live.verified;
  const withdrawn = live.take(chunk);
  const isLonger = Boolean(chunk.choices?.[0]?.delta?.content);
  if (isReplay || !isWanted(check)) return;
  const [done, total] = chunk.moa?.reading ?? [];
  const reading = done < total && `reading, ${done} of ${total} tokens`;
  const isRead = reading && reading !== node.check?.reading;
  const isNews = isLonger || withdrawn || isRead || live.verified !== before;
  check.signs.heard(seconds(), isNews);
  // What comes behind an end, such as its figures, is no check yet.
  if (!check.shown && (isNews || node.check)) {
    const checked = Math.max(live.verified, [...verifiedText(node)].length) - live.begin;
    node.check = { checked, of: live.characters.length - live.begin, reading, sign: live.sign };
  }
  const goesOn = !check.shown && live.text.length > node.text.length;
  if (withdrawn || goesOn) showCheck(check, withdrawn);
  check.frame ||= requestAnimationFrame(() => drawCheck(check));
}

// From here on the check is shown as a stream: the text is another one, or longer.
function showCheck(check, withdrawn) {
  const { node, answer: live } = check;
  check.shown = true;
  check.corrected ||= Boolean(withdrawn);
  check.withdrawn = withdrawn;
  live.done = false;
  node.check = withdrawn ? { corrected: true } : { goesOn: true };
  if (withdrawn) notice(said("The verifier corrects an answer that was written offline"));
  else notice(said("The verifier goes on with an answer"));
}

function drawCheck(check) {
  check.frame = 0;
  const { conversation, node, answer: live, shown, withdrawn } = check;
  if (conversation === current && isWanted(check)) view.draw(node, shown ? live : null, withdrawn);
  check.withdrawn = "";
}

// What the check has made of the answer; whether it is another state than before.
function endCheck(check) {
  const { node, answer: live } = check;
  if (live.done && live.allVerified) {
    tellEnd(check);
    node.text = live.text;
    node.settled = live.text.length;
    node.verified = true;
    node.reason = live.reason;
    if (live.calls.length) node.calls = live.calls;
    if (node.usage) {
      const { completion_tokens: tokens, total_tokens: total } = live.usage ?? {};
      if (tokens) Object.assign(node.usage, { tokens, total });
      if (node.before) delete node.usage.tokens; // they are those of the rest
      node.usage.speed = 0; // it was another text's
    }
    return true;
  }
  // The verifier is gone again, perhaps in the middle of its own text.
  if (check.shown || live.done) node.settled = live.settled.length;
  if (!check.shown) return false;
  delete node.usage; // of another text
  node.text = live.text;
  node.reason = live.reason;
  return true;
}

// What was said of the check while it ran is no longer so.
function tellEnd(check) {
  const { node, answer: live, shown } = check;
  if (!shown) check.withdrawn = behindCommon(node.text, live.text);
  let done = shown ? "completed" : "verified";
  if (check.corrected || check.withdrawn) done = "corrected";
  notice(said(`The verifier has ${done} an answer that was written offline`));
}

// ---- answers behind one that was corrected

// What an answer says to the questions behind it.
const content = ({ text, calls = [] }) => JSON.stringify([text, calls]);

// This answer says something else now. Those behind it were asked with the old text, so that even
// what is verified of them would not have been said.
function withdraw(conversation, node) {
  const streams = [];
  for (const later of Object.values(conversation.nodes)) {
    const isAnswer = later.role === "assistant" && later !== node && !later.error;
    if (!isAnswer || !path(conversation, later.id).includes(node)) continue;
    const wasStale = later.stale;
    const isWritten = running.has(later.id);
    if (later.state === "running" && !isWritten) continue; // another tab does this
    later.stale = true;
    if (isWritten) continue; // until its end
    notVerified(later);
    if (!wasStale) streams.push(later.stream);
    if (conversation === current) view.draw(later);
  }
  drop(conversation, streams);
}

// Stops streams once it is kept that nobody waits for them: a reload would seek them.
async function drop(conversation, streams) {
  await keep(conversation);
  for (const stream of streams.filter(Boolean)) stop(stream, settings.key);
}

function notVerified(node) {
  Object.assign(node, { verified: false, settled: 0 });
  delete node.check;
}

let returns = 0; // of the verifier
const triedAt = new Map(); // node id -> the return at which it was asked again in vain

// Whether this answer can be asked for again now: all that is before it is settled.
function isDue(conversation, node) {
  if (!willBeAskedAgain(node) || triedAt.get(node.id) === returns) return false;
  const isOpen = (one) => one.state === "running" || willBeChecked(one) || willBeAskedAgain(one);
  return node.state !== "running" && !path(conversation, node.parent).some(isOpen);
}

// Asks for an answer once more, in one tab.
async function askAgain(conversation, node) {
  const ask = async () => {
    const { text, calls, reason, usage, before } = node;
    node.earlier = { text, calls, reason, usage, before };
    Object.assign(node, { text: "", before: "", settled: 0, stream: "", reason: "", lost: false });
    for (const name of ["stale", "verified", "calls"]) delete node[name];
    await write(conversation, node, { expected: text });
  };
  if (!navigator.locks) {
    await ask();
    return;
  }
  const how = { ifAvailable: true };
  await navigator.locks.request(`again-${conversation.id}`, how, async (lock) => {
    if (!lock) return; // another tab does it
    await shelf.refresh(conversation).catch(() => {});
    if (!running.has(node.id) && isDue(conversation, node)) await ask();
  });
}

// An answer was asked again. Unless it is verified to its end, the old text stands again.
function endAgain(work) {
  const { node, conversation, halted } = work;
  const { earlier } = node;
  delete node.earlier;
  if (node.verified && !node.error && !halted) {
    if (!work.differs) work.withdrawn = behindCommon(earlier.text, node.text);
    if (content(node) !== content(earlier)) withdraw(conversation, node);
    return;
  }
  const { stream } = node;
  delete node.error;
  Object.assign(node, earlier, { stream: "", lost: false, stale: true });
  if (halted) node.reason = "stopped";
  triedAt.set(node.id, returns);
  drop(conversation, [stream]);
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
  const isOnline = $("link").dataset.state === "online";
  const all = [...running.values(), ...followed.values()];
  for (const { node, answer: live, signs, conversation, shown = true } of all) {
    if (!shown && !node.check) continue;
    const words = signs.words(seconds(), isOnline);
    if (node.check) node.check.sign = words;
    if (words === live.sign) continue;
    live.sign = words;
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
  if (data.removed && known) removedElsewhere(known);
  if (data.changed && known) await changedElsewhere(known);
  if (data.changed && !known) await begunElsewhere(data.changed);
  list();
}

function removedElsewhere(known) {
  const isWritten = [...running.values()].some((work) => work.conversation === known);
  if (isWritten) return;
  conversations = conversations.filter((other) => other !== known);
  if (known === current) open(newConversation());
}

async function changedElsewhere(known) {
  const before = JSON.stringify(known);
  await shelf.refresh(known).catch(() => {});
  const isChanged = JSON.stringify(known) !== before;
  const isEdited = Boolean(document.querySelector("textarea.edit")); // the user is typing in it
  if (known === current && isChanged && !isEdited) open(current);
}

async function begunElsewhere(id) {
  const found = await shelf.read(id).catch(() => null);
  const isNew = found && !conversations.some((one) => one.id === id);
  if (isNew) conversations.push(found);
}

function mine() {
  return [...running.values()].filter((work) => work.conversation === current);
}

function buttons() {
  const busy = mine().length > 0;
  $("stop").hidden = !busy;
  $("send").disabled = $("send").hidden = busy;
}

// ---- the link

const LINKS = {
  online: ["connected", "the verifier checks every word"],
  late: ["waiting", "no word from the verifier yet: this device goes on"],
  limited: ["rate used up", ""],
  offline: ["offline", "the device writes alone"],
  refused: ["refused", "the verifier refused this device"],
  none: ["device only", "there is no verifier: nothing is verified"],
  locked: ["key needed", "the endpoint asks for an API key: see the settings"],
  broken: ["not loaded", "the drafter could not be loaded"],
  unreachable: ["no endpoint", "the endpoint does not answer"],
};

// Whether there is no verifier at all.
const nobodyVerifies = () => $("link").dataset.state === "none";

let verifier = "";
function linkState(state, detail = "") {
  const [name, words] = LINKS[state] ?? [state, ""];
  const isAnother = $("link").dataset.state !== state;
  if (isAnother && state === "online") {
    returns++;
    onlineAt = seconds();
  }
  if (isAnother && state === "limited") notice(detail);
  $("link").dataset.state = state;
  $("link-text").textContent = name;
  $("link").title = [verifier, said(words), detail].filter(Boolean).join(": ");
  if (isAnother) tick(); // what answers say of the verifier is true of this state
}

// Why nothing is verified, for as long as that is so; and what becomes of answers by that. One
// answer alone may be refused: of that the link's own state knows nothing.
function showTrouble(state, detail) {
  const trouble = troubleOf(state, detail);
  if (trouble === $("trouble").textContent) return;
  $("trouble").textContent = trouble;
  $("trouble").hidden = !trouble;
  if (trouble) say(trouble);
  refuses(state === "refused");
  if (current) view.notes((node) => running.has(node.id) || followed.has(node.id));
}

// Text files become parts of the message; of others it is said what they are.
async function attach(files) {
  const refused = [];
  for (const file of files) {
    try {
      const block = asBlock(file.name, await textOf(file));
      const before = $("prompt").value.trimEnd();
      $("prompt").value = `${before}${before && "\n\n"}${block}`;
    } catch (error) {
      if (!(error instanceof Unattachable)) throw error;
      refused.push(error.message);
    }
  }
  if (refused.length) notice(refused.join(". "));
  $("prompt").focus();
}

// Files that are dropped anywhere on the page, where a browser would leave it to show them; and
// those that are pasted into the message.
function bindFiles() {
  const carries = (event) => event.dataTransfer?.types.includes("Files");
  const isOver = (is) => $("composer").classList.toggle("takes-files", is);
  document.addEventListener("dragover", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    isOver(true);
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) isOver(false); // out of the window
  });
  document.addEventListener("drop", (event) => {
    isOver(false);
    if (!carries(event)) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
  on("prompt", "paste", (event) => {
    const files = filesOf(event.clipboardData);
    if (!files.length) return;
    event.preventDefault();
    attach(files);
  });
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
  const problems = {
    schema: problemOf(() => schemaOf(settings.schema)),
    tools: problemOf(() => toolsOf(settings.tools)),
  };
  for (const [name, problem] of Object.entries(problems)) {
    $(`${name}-problem`).textContent = problem;
    $(name).setAttribute("aria-invalid", String(Boolean(problem)));
  }
  const words = structureWords(settings.schema, settings.tools);
  $("structure").textContent = words;
  $("structure").hidden = !words;
}

// Asks for the endpoint's state, and shows it.
async function look() {
  try {
    await showStatus(await linkStatus(settings.key));
  } catch (error) {
    const isLocked = error instanceof ApiError && error.status === 401;
    if (isLocked) needKey();
    $("cut-switch").hidden = true;
    linkState(isLocked ? "locked" : "unreachable");
    showTrouble("");
    figures.unknown();
  }
}

async function showStatus(status) {
  context = status.context ?? 0;
  verifier = status.verifier ?? "";
  checkedBy(status.upstream ? "upstream" : "verifier");
  const before = [model, broken].join();
  broken = status.link === "broken" ? status.detail : "";
  await nameModel(status);
  if (status.link === "locked") needKey();
  const isEmpty = current && !current.leaf;
  if (isEmpty && before !== [model, broken].join()) view.show(current); // its words are others now
  if (status.link === "online") recheck();
  linkState(status.link, status.detail);
  showTrouble(status.link, status.detail);
  $("cut-switch").hidden = status.cut === undefined;
  $("connected").checked = !status.cut;
  $("figures").hidden = ["none", "broken"].includes(status.link); // all of them are the verifier's
  figures.take(status, performance.now());
}

// Whose text it is going to be.
async function nameModel(status) {
  const named = status.model || model || (await modelName(settings.key));
  toy = status.toy ?? [];
  if (named !== model || status.demo !== demo) {
    model = named;
    demo = status.demo;
    $("model").textContent = demo ? DEMO.name : model;
    $("max_tokens").placeholder = String(status.max_tokens ?? "");
  }
  const about = [
    demo ? DEMO.name : model,
    verifier && `${said("verifier")} ${verifier}`,
    status.verifier_version,
    context && `context of ${context} tokens`,
  ];
  $("about").textContent = about.filter(Boolean).join(" · ");
}

// ---- start

function sidebar(shown) {
  $("sidebar").classList.toggle("shown", shown);
}

function on(id, event, act) {
  $(id).addEventListener(event, act);
}

function bind() {
  bindComposer();
  bindFiles();
  bindSidebar();
  bindKeys();
  bindSettings();
  on("connected", "change", async (event) => {
    await setLink(event.target.checked, settings.key).catch((error) => notice(error.message));
    look();
  });
}

function send() {
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
}

function bindComposer() {
  on("composer", "submit", (event) => {
    event.preventDefault();
    send();
  });
  on("prompt", "keydown", (event) => {
    // Within an input method Enter chooses a word.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  on("stop", "click", () => mine().forEach(halt));
  on("attach", "click", () => $("attach-file").click());
  on("attach-file", "change", async (event) => {
    const files = [...event.target.files];
    event.target.value = ""; // the same file may be chosen again
    await attach(files);
  });
  on("structure", "click", openSettings);
}

function bindSidebar() {
  on("new", "click", () => {
    fresh();
    sidebar(false);
  });
  on("search", "input", list);
  on("export", "click", () => {
    save("conversations.json", JSON.stringify(conversations, null, 1), "application/json");
  });
  on("import", "click", () => $("import-file").click());
  on("import-file", "change", (event) => {
    const [file] = event.target.files;
    if (file) importFile(file);
    event.target.value = "";
  });
  on("remove-all", "click", removeAll);
  on("open-sidebar", "click", () => {
    sidebar(true);
    $("close-sidebar").focus();
  });
  on("close-sidebar", "click", () => sidebar(false));
  document.querySelector("main").addEventListener("click", (event) => {
    if (event.target.id !== "open-sidebar") sidebar(false);
  });
}

function bindKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      sidebar(false);
      mine().forEach(halt);
    }
    if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      sidebar(true);
      $("search").focus();
    }
    if (event.key === "n" && event.altKey) {
      event.preventDefault();
      fresh();
    }
  });
}

function bindSettings() {
  on("open-settings", "click", openSettings);
  on("settings", "close", look);
  $("endpoint").append(...ENDPOINTS.map((address) => new Option(address)));
  if (!ENDPOINTS.includes(settings.endpoint)) settings.endpoint = ENDPOINTS[0] ?? "";
  for (const name of Object.keys(DEFAULTS)) bindSetting(name);
  on("system", "change", () => {
    current.system = $("system").value;
    if (conversations.includes(current)) keep(current);
  });
  on("endpoint", "change", () => {
    // The key was for another endpoint.
    $("key").value = settings.key = "";
    sessionStorage.removeItem("key");
    choose($("endpoint").value);
  });
  $("mode").parentElement.hidden = !MODES;
  $("endpoint").parentElement.hidden = ENDPOINTS.length < 2;
  document.documentElement.dataset.theme = settings.theme;
  tellStructure();
}

function bindSetting(name) {
  const field = $(name === "stop" ? "stop_texts" : name); // the button is called so
  field.value = settings[name];
  field.addEventListener("change", () => {
    settings[name] = field.value;
    const { key, ...kept } = settings;
    sessionStorage.setItem("key", key); // a key is kept no longer than this tab
    localStorage.setItem("settings", JSON.stringify(kept));
    document.documentElement.dataset.theme = settings.theme;
    tellStructure();
  });
}

async function start() {
  const kept = await shelf.all();
  conversations = kept.conversations;
  if (kept.damaged) {
    const which = kept.damaged > 1 ? "conversations are" : "conversation is";
    notice(`${kept.damaged} damaged ${which} not shown`);
  }
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
  setInterval(() => {
    if (!document.hidden) look();
  }, 1000);
  setInterval(tick, 1000 * LOOK_SECONDS);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) look();
  });
}

start();
