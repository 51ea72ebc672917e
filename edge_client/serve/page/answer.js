// The text of one answer while it is written: what is verified, what is not yet, and what was
// withdrawn. Positions count characters (code points), as the endpoint does, from where the text
// before ends that is continued.

import { callOf } from "./structure.js";

export class Answer {
  constructor(before = "") {
    this.characters = [...before];
    this.begin = this.verified = this.characters.length;
    this.reason = "";
    this.allVerified = true;
    this.done = false;
    this.sign = ""; // what the reader is told while nothing changes
    this.usage = null;
    this.calls = []; // of tools, each complete
  }

  get text() {
    return this.characters.join("");
  }

  get settled() {
    return this.characters.slice(0, this.verified).join("");
  }

  get provisional() {
    return this.characters.slice(this.verified).join("");
  }

  // Whether this reading of the prompt is shown: no text has come. Many engines do not tell.
  awaits(reading) {
    return reading?.done && this.characters.length === this.begin;
  }

  // Takes a chunk of the stream; returns the text that it withdrew, if any.
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0]; // the page asks for one
    if (!choice) return "";
    const marks = choice.moa ?? {};
    const withdrawn = this.#cut(marks.cut);
    if (choice.delta) this.#add(choice.delta);
    if (marks.verified !== undefined) this.verified = this.begin + marks.verified;
    this.verified = Math.min(this.characters.length, this.verified);
    if (choice.finish_reason) this.#end(choice.finish_reason, marks);
    return withdrawn;
  }

  // Drops what is behind so many characters of the stream; returns it.
  #cut(kept) {
    if (kept === undefined) return "";
    return this.characters.splice(this.begin + kept).join("");
  }

  #add({ content, tool_calls: calls = [] }) {
    if (content) this.characters.push(...content);
    for (const { index, ...call } of calls) this.calls[index] = callOf(call);
  }

  #end(finish, marks) {
    this.done = true;
    this.reason = marks.reason ?? finish;
    this.allVerified = marks.all_verified ?? true;
    if (this.allVerified) this.verified = this.characters.length;
  }
}
