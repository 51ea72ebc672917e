// The conversation on the screen: messages, what can be done with each, growing answers.

import { Answer } from "./answer.js";
import { markdown, putOff } from "./render.js";
import { isRefusing, said } from "./signs.js";
import { newestLeaf, path, siblings } from "./store.js";
import { argumentsOf, standing } from "./structure.js";

const STILL_SHOWN = 1500; // ms that withdrawn text stays to be seen
const ENDED = {
  stopped: "stopped",
  lost: "cut off, for the endpoint has forgotten the rest: Continue goes on",
  guard: "the device stopped here",
  context: "ended because the context is full: begin a new conversation",
};

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

export function button(text, label, act) {
  const made = element("button", "", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

// A button that copies, and says whether it could.
function copyButton(label, text) {
  const made = button("Copy", label, async () => {
    made.textContent = (await copy(text())) ? "Copied ✓" : "Not allowed here";
    setTimeout(() => {
      made.textContent = "Copy";
    }, 1500);
  });
  return made;
}

async function copy(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  // Over plain http a browser offers no clipboard; a selection can still be copied.
  const field = element("textarea", "hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } finally {
    field.remove();
  }
}

function checkOf({ corrected, goesOn, checked, of, reading }) {
  if (corrected) return said("the verifier is correcting this answer");
  if (goesOn) return said("the verifier goes on with this answer");
  return reading ? `checking: ${reading}` : `checking, ${checked} of ${of} characters`;
}

const CHANGED_BEFORE = "an answer before it was corrected";

// Of an answer that is being written: what of it is not verified, and a sign of life where nothing
// comes.
export function progressOf(node, live) {
  const open = live.characters.length - live.verified;
  const notes = [];
  if (node.earlier) notes.push(`asked again: ${CHANGED_BEFORE}`);
  if (live.awaits(node.reading)) {
    notes.push(`reading the prompt, ${node.reading.done} of ${node.reading.total} tokens`);
  }
  if (open && !node.earlier) notes.push(`${open} characters not verified yet`);
  if (live.sign) notes.push(live.sign);
  return notes.join("; ");
}

// Of an answer that is complete: what was written by whom, and what becomes of it. True of the text
// that it stands below.
export function noteOf(node) {
  if (node.error) return node.error;
  if (isEmpty(node)) {
    if (isRefusing()) return said("nothing was written, and the verifier refuses this device");
    if (willBeChecked(node) || willBeAskedAgain(node)) {
      return said("nothing is written yet: asked again when the verifier is back");
    }
    return "nothing was written";
  }
  return [endNote(node), checkNote(node)].filter(Boolean).join("; ");
}

// Whether nothing came of it.
function isEmpty(node) {
  return node.verified === false && !node.text && !node.calls?.length && !node.check;
}

// Why it ended, where its reader could take that for its end.
function endNote(node) {
  if (node.reason !== "length") return ENDED[node.reason] ?? "";
  const tokens = node.usage?.tokens;
  const where = tokens ? `${tokens} tokens` : "the longest answer of the settings";
  return continuable(node) ? `cut at ${where}: Continue goes on` : `cut at ${where}`;
}

// What of it is not verified, and what becomes of that.
function checkNote(node) {
  if (node.stale) {
    const waits = willBeAskedAgain(node) && !isRefusing();
    return `${CHANGED_BEFORE}: ${waits ? "waiting to be" : "not"} asked again`;
  }
  if (node.check) return [checkOf(node.check), node.check.sign].filter(Boolean).join("; ");
  if (node.verified !== false) return "";
  const written = [...node.text].length;
  const alone = written - [...verifiedText(node)].length;
  if (!alone && node.reason === "lost") return "what stands here is verified";
  if (!alone) return "its end was not verified";
  const then = checkToCome(node);
  if (alone === written) return `written by this device alone: ${then}`;
  return `the last ${alone} characters were written by this device alone: ${then}`;
}

// What becomes of text that is not verified.
function checkToCome(node) {
  if (!willBeChecked(node)) return "not checked";
  if (isRefusing()) return said("not checked, for the verifier refuses this device");
  // True also while the verifier is there and checks an earlier answer.
  return said("waiting for the verifier's check");
}

// What of an answer is the target's own.
export function verifiedText(node) {
  return node.verified === false ? node.text.slice(0, node.settled ?? 0) : node.text;
}

// Ends that the model did not choose.
const CUT = ["length", "stopped", "guard", "link", "lost"];

// Whether more of this answer can be asked for. One that waits for its check goes on by itself.
export function continuable(node) {
  if (node.calls?.length) return false; // it goes on with their results
  if (!node.text || willBeChecked(node) || willBeAskedAgain(node)) return false;
  return CUT.includes(node.reason);
}

// What its button says of what is not verified: an answer goes on behind what is.
export function continuationOf(node, nobodyVerifies) {
  if (node.verified !== false || nobodyVerifies) return "";
  return said("Goes on behind what the verifier has checked: the rest is written anew");
}

// Whether the endpoint has this answer checked when the verifier is back.
export function willBeChecked(node) {
  if (node.verified !== false || !node.stream || node.stale) return false;
  return !node.lost && !node.error && !node.left && node.reason !== "stopped";
}

// Whether this answer is asked again. One that the user has ended is not, nor one whose calls may
// have been made already.
export function willBeAskedAgain(node) {
  if (!node.stale || node.error || node.left) return false;
  return node.reason !== "stopped" && !node.calls?.length;
}

// Who has written what is there: the target's name stands over the target's text.
export function writerOf(node) {
  const name = node.model || "Assistant";
  if (verifiedText(node) === node.text) return name;
  return node.settled ? `${name}, and this device` : `This device, for ${name}`;
}

// The same of an answer that is being written.
export function writingOf(node, live) {
  const name = node.model || "Assistant";
  if (rest(node, live)) return `${name}, and this device`;
  if (live.verified === live.characters.length) return name;
  return live.verified ? `${name}, and this device` : `This device, for ${name}`;
}

// An answer's length, whether all of it is verified, and its speed.
export function measured({ text, usage, verified, error }) {
  const { tokens, speed, total, context } = usage ?? {};
  if (!tokens && !text) return "";
  const parts = [tokens ? `${tokens} tokens` : `${[...text].length} characters`];
  if (verified && !error) parts[0] += ", verified";
  if (speed > 0) parts.push(`${rate(speed)} tokens/s`);
  if (context) parts.push(`${total} of ${context} tokens of context`);
  return parts.join(" · ");
}

// A slow model's speed has a decimal: 1.4 tokens/s is not 1.
function rate(speed) {
  return speed < 10 ? speed.toFixed(1) : String(Math.round(speed));
}

// The line above a message.
function headOf(node, live) {
  if (node.role === "user") return "You";
  if (node.role === "tool") return `Result of ${node.name}`;
  return live ? writingOf(node, live) : writerOf(node);
}

// An answer that is complete; what its target has not said is marked.
function completeText(node) {
  const settled = node.settled ?? node.text.length;
  return markdown(node.text.slice(0, settled), node.text.slice(settled));
}

// What an answer that is asked again said before behind its new text, as long as the two agree.
function rest(node, live) {
  const before = node.earlier ? standing(node).text : "";
  return before.startsWith(live.text) ? before.slice(live.text.length) : "";
}

// Where text goes on: the last paragraph, or the body itself while there is none.
function lastOf(body) {
  return body.lastElementChild ?? body;
}

// One call, readable: the function's name, and each argument on a line of its own.
function callBlock(call) {
  const block = element("section", "call");
  const head = element("div");
  head.append("Calls ", element("code", "", call.name));
  const list = element("dl");
  for (const [argument, value] of argumentsOf(call)) {
    list.append(element("dt", "", argument), element("dd", "", value));
  }
  block.append(head, list);
  return block;
}

export class ChatView {
  // `act` does what the buttons ask: { retry(node), proceed(node), edit(node, text), show(leaf),
  // ask(text), empty(), results(node, texts), leave(node),
  // nobodyVerifies() }.
  constructor(parent, act) {
    this.parent = parent;
    this.act = act;
    this.boxes = new Map();
    this.struck = new Map(); // body of a message -> what is struck out in it
  }

  show(conversation) {
    this.conversation = conversation;
    this.boxes.clear();
    const nodes = path(conversation);
    this.parent.replaceChildren(
      ...(nodes.length ? nodes.map((node) => this.#message(node)) : [this.#empty()]),
    );
    this.toEnd();
  }

  #empty() {
    const box = element("div", "empty");
    const { words, examples, about = [] } = this.act.empty();
    box.append(...words.map((text) => element("p", "", text)));
    box.append(...about.map((text) => markdown(text)));
    box.append(...examples.map((text) => button(text, "", () => this.act.ask(text))));
    return box;
  }

  toEnd() {
    this.parent.scrollTop = this.parent.scrollHeight;
  }
  get atEnd() {
    return this.parent.scrollHeight - this.parent.scrollTop - this.parent.clientHeight < 80;
  }

  // Shows the text of a message as it is now; `live` is the `Answer` behind it while it is written.
  draw(node, live = null, withdrawn = "") {
    const box = this.boxes.get(node.id);
    if (!box) return;
    const wasAtEnd = this.atEnd;
    const body = box.querySelector(".body");
    box.setAttribute("aria-busy", String(Boolean(live)));
    const isStruck = Boolean(withdrawn) || this.struck.has(body);
    body.classList.toggle("caret", Boolean(live) && !isStruck); // nothing is written behind that
    if (node.role === "assistant") this.#answer(body, node, live, withdrawn);
    else body.textContent = node.text;
    this.#calls(box, node, live);
    this.#note(box, node, live);
    const more = box.querySelector(".more");
    if (more) {
      more.hidden = !continuable(node);
      more.title = continuationOf(node, this.act.nobodyVerifies());
    }
    if (wasAtEnd) this.toEnd();
  }

  // The text of an answer, with what is not verified marked and what was withdrawn struck out.
  #answer(body, node, live, withdrawn) {
    const wasOpened = body.querySelector("details")?.open;
    const text = live
      ? markdown(live.settled, live.provisional + rest(node, live))
      : completeText(node);
    body.replaceChildren(text);
    // Formulas that took too long for this frame come in a later one; a live answer is drawn again
    // in any case.
    if (putOff() && !live) {
      requestAnimationFrame(() => requestAnimationFrame(() => this.draw(node)));
    }
    if (wasOpened) body.querySelector("details")?.setAttribute("open", "");
    for (const block of body.querySelectorAll("pre")) this.#codeBar(block);
    if (withdrawn) this.#strike(body, withdrawn);
    else if (this.struck.has(body)) lastOf(body).append(this.struck.get(body));
  }

  // The calls of an answer, and where they are the last word, fields for what they return. They are
  // drawn anew only where they have changed: the user may be typing.
  #calls(box, node, live) {
    const calls = live?.calls ?? node.calls ?? [];
    const asks = !live && calls.length > 0 && this.conversation?.leaf === node.id;
    const shown = calls.length ? JSON.stringify([calls, asks]) : "";
    const place = box.querySelector(".calls");
    if (!place || (place.dataset.shown ?? "") === shown) return;
    place.dataset.shown = shown;
    place.replaceChildren(...calls.map(callBlock));
    if (asks) place.append(this.#results(node, calls));
  }

  // A form: what each call has returned, typed by the user.
  #results(node, calls) {
    const form = element("form", "results");
    const fields = calls.map((call) => {
      const label = element("label", "", `Result of ${call.name}`);
      const field = element("textarea");
      field.rows = 1;
      field.required = true;
      field.placeholder = "What it returned, as text or JSON";
      label.append(field);
      form.append(label);
      return field;
    });
    const send = button(calls.length > 1 ? "Send the results" : "Send the result", "", () => {});
    send.type = "submit";
    form.append(send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.act.results(
        node,
        fields.map((field) => field.value),
      );
    });
    return form;
  }

  // The language of a code block, and a button that copies it.
  #codeBar(block) {
    const bar = element("div", "code-bar");
    bar.append(
      element("span", "", block.dataset.language),
      copyButton("Copy this code", () => block.querySelector("code").textContent),
    );
    block.before(bar);
  }

  #strike(body, text) {
    const gone = element("del", "retracted", text);
    lastOf(body).append(gone);
    this.struck.get(body)?.remove();
    this.struck.set(body, gone);
    const remove = () => {
      gone.remove();
      if (this.struck.get(body) === gone) this.struck.delete(body);
    };
    // Without motion there is no animation, and a page in the background ends none.
    setTimeout(remove, STILL_SHOWN);
    gone.addEventListener("animationend", remove);
  }

  #message(node) {
    const box = element("article", `message ${node.role}`);
    const parts = ["who", "body", "calls", "note", "measured"];
    box.append(...parts.map((name) => element("div", name)), this.#tools(node, box));
    box.querySelector(".body").dir = "auto";
    this.boxes.set(node.id, box);
    this.draw(node);
    return box;
  }

  // The lines below all answers that are complete: what becomes of them depends on the link.
  notes(isWritten) {
    for (const id of this.boxes.keys()) {
      const node = this.conversation.nodes[id];
      if (!isWritten(node)) this.note(node);
    }
  }

  // The line below a message, as it is now.
  note(node, live = null) {
    const box = this.boxes.get(node.id);
    if (box) this.#note(box, node, live);
  }

  #note(box, node, live) {
    const isWhole = node.role === "assistant" && !live;
    const note = box.querySelector(".note");
    note.classList.toggle("error", Boolean(node.error));
    note.classList.toggle("ended", !live && Boolean(node.verified));
    box.querySelector(".who").textContent = headOf(node, live);
    if (live && node.check) {
      note.textContent = checkNote(node);
    } else if (live) {
      note.textContent = progressOf(node, live);
    } else {
      note.textContent = isWhole ? noteOf(node) : "";
    }
    const leave = box.querySelector(".leave");
    if (leave) leave.hidden = !node.check;
    box.querySelector(".measured").textContent = isWhole ? measured(node) : "";
  }

  #tools(node, box) {
    const tools = element("div", "tools");
    const family = siblings(this.conversation, node);
    if (family.length > 1) {
      const at = family.indexOf(node);
      const turn = (by) => this.act.show(newestLeaf(this.conversation, family[at + by]));
      const back = button("‹", "Earlier version", () => turn(-1));
      const on = button("›", "Later version", () => turn(1));
      back.disabled = at === 0;
      on.disabled = at === family.length - 1;
      tools.append(back, `${at + 1}/${family.length}`, on);
    }
    tools.append(
      copyButton("Copy this message", () => node.text || JSON.stringify(node.calls, null, 1)),
    );
    if (node.role === "user") {
      tools.append(button("Edit", "Edit this message", () => this.#edit(node, box)));
    }
    if (node.role === "assistant") {
      tools.append(
        button("Again", "Again: another answer, sampled at temperature 0.8 where none is set", () =>
          this.act.retry(node),
        ),
      );
      const more = button("Continue", "Continue this answer", () => this.act.proceed(node));
      more.className = "more";
      const leave = button("Leave unchecked", "Leave this answer unchecked", () =>
        this.act.leave(node),
      );
      leave.className = "leave";
      leave.hidden = true;
      tools.append(more, leave);
    }
    return tools;
  }

  #edit(node, box) {
    const field = element("textarea", "edit");
    field.value = node.text;
    field.setAttribute("aria-label", "Edited message");
    const done = (send) => {
      if (send && field.value.trim()) this.act.edit(node, field.value);
      else this.show(this.conversation);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") done(false);
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        done(true);
      }
    });
    const row = element("div", "tools");
    row.append(
      button("Send", "", () => done(true)),
      button("Cancel", "", () => done(false)),
    );
    box.querySelector(".body").replaceChildren(field);
    box.querySelector(".tools").replaceWith(row);
    field.focus();
  }
}

export { Answer };
