// The text of one answer while it is written: what is verified, what is not yet, and what was
// withdrawn. Positions count characters (code points), as the endpoint does, from where the text
// before ends that is continued.

import { callOf } from "./structure.js";

export class Answer {
  // Of the text `before` its first part is verified, as a rule all of it. Where it is not, nothing
  // behind it is.
  constructor(before = "", settled = before.length) {
    this.characters = [...before];
    this.begin = this.characters.length;
    this.verified = [...before.slice(0, settled)].length;
    this.isBroken = this.verified < this.begin;
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

  // Whether all of it is verified.
  get isSettled() {
    return this.allVerified && this.verified === this.characters.length;
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
    const { verified, unverified } = marks;
    // A stream that is never corrected marks only what is not verified.
    const isUnmarked = verified === undefined && !unverified;
    const isSure = isUnmarked && this.verified === this.characters.length;
    if (choice.delta) this.#add(choice.delta);
    const { length } = this.characters;
    if (verified !== undefined && !this.isBroken) this.verified = this.begin + verified;
    this.verified = isSure ? length : Math.min(length, this.verified);
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
    this.allVerified = (marks.all_verified ?? true) && !this.isBroken;
    if (this.allVerified) this.verified = this.characters.length;
  }
}
