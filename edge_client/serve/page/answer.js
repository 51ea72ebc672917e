// The text of one answer while it is written: what is verified, what is not yet, and what was withdrawn.
// Positions count characters (code points), as the endpoint does, from where the text before ends that is continued.

import { callOf } from "./structure.js";

export class Answer {
  constructor(before = "") {
    this.characters = [...before];
    this.begin = this.verified = this.characters.length;
    this.reason = "";
    this.allVerified = true;
    this.done = false;
    this.sign = "";  // what the reader is told while nothing changes
    this.usage = null;
    this.calls = [];  // of tools, each complete
  }

  get text() { return this.characters.join(""); }
  get settled() { return this.characters.slice(0, this.verified).join(""); }
  get provisional() { return this.characters.slice(this.verified).join(""); }

  // Takes a chunk of the stream; returns the text that it withdrew, if any.
  take(chunk) {
    let withdrawn = "";
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices ?? []) {
      const marks = choice.moa ?? {};
      if (marks.cut !== undefined) {
        withdrawn = this.characters.splice(this.begin + marks.cut).join("");
      }
      if (choice.delta?.content) this.characters.push(...choice.delta.content);
      for (const { index, ...call } of choice.delta?.tool_calls ?? []) this.calls[index] = callOf(call);
      if (marks.verified !== undefined) this.verified = this.begin + marks.verified;
      this.verified = Math.min(this.characters.length, this.verified);
      if (choice.finish_reason) {
        this.done = true;
        this.reason = marks.reason ?? choice.finish_reason;
        this.allVerified = marks.all_verified ?? true;
        if (this.allVerified) this.verified = this.characters.length;
      }
    }
    return withdrawn;
  }
}
