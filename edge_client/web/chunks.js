// The events of a turn as chunks of OpenAI's streams, as the page reads them from an endpoint (moa/api/present.py).
// Plain data in `state`, so that it can be kept: a page that was killed shows the same text again, and goes on.

export class Chunks {
  constructor(state = {}) {
    // `ends`: how many characters (code points) of the text are there after each token; `verified`: how many will not change.
    this.state = { prompt: 0, text: "", ends: [], verified: 0, ...state };
  }

  // What is there already, for a reader that begins anew.
  replay() { return this.#choice(this.state.text); }

  // The chunk that tells of an event, or null.
  take(event) {
    const state = this.state;
    switch (event.event) {
      case "prompt":
        state.prompt = event.ids.length;
        return null;
      case "token": {
        state.ends.push(this.#end(state.ends.length) + [...event.text].length);
        state.text += event.text;
        if (event.status === "verified") state.verified = this.#end(state.ends.length);
        return this.#choice(event.text);
      }
      case "confirm":
        state.verified = this.#end(event.stop - state.prompt);
        return this.#choice();
      case "retract": {
        state.ends.length = event.start - state.prompt;
        state.text = [...state.text].slice(0, event.characters).join("");
        state.verified = Math.min(state.verified, event.characters);
        return this.#choice("", { cut: event.characters });
      }
      case "link":
        return { moa: { link: event.state, detail: event.detail } };
      case "notice":
        return { moa: { notice: event.message } };
      case "done":
        return this.#done(event);
      default:
        return null;
    }
  }

  #end(tokens) { return tokens ? this.state.ends[tokens - 1] : 0; }

  #choice(content = "", more = {}) {
    return { choices: [{ delta: { content }, moa: { verified: this.state.verified, ...more } }] };
  }

  #done({ reason, verified, text, stats }) {
    const state = this.state, rest = text.startsWith(state.text) ? text.slice(state.text.length) : "";  // held back until the end
    state.text += rest;
    if (verified) state.verified = [...state.text].length;
    const { choices: [choice] } = this.#choice(rest, { reason, all_verified: verified });
    const tokens = state.ends.length;
    state.end = { choices: [{ ...choice, finish_reason: reason }], usage: { completion_tokens: tokens, total_tokens: state.prompt + tokens, moa: stats } };
    return state.end;
  }
}
