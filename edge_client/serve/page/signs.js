// Signs of life: nothing of an answer that is being written stands still on the screen for a second
// without one. Pure; times are in seconds. As edge_client/screen/words.py has it for the terminal.

// How often the page looks. Less than a second together with each of the two below, so that a busy
// page keeps the promise, too.
export const LOOK_SECONDS = 0.2;
// Seconds without a change after which it is said that the page waits, and steps in which these are
// counted.
const FIRST_SECONDS = 0.7;
const STEP_SECONDS = 0.5;

// Who checks the text, as its reader knows it: a verifier, or an upstream, an engine of others.
let checker = "verifier";

export function checkedBy(name) {
  checker = name;
}

// These words, with the name of whoever checks in place of the verifier's.
export function said(words) {
  return words.replaceAll("verifier", checker);
}

// Whether that refuses this device: it is there, and checks nothing until somebody changes that.
let refusing = false;

export function refuses(is) {
  refusing = is;
}

export function isRefusing() {
  return refusing;
}

// Why text is not verified now, for the reader; "" while it is, or while that is not known yet.
export function troubleOf(state, detail) {
  const why = detail ? `: ${detail}` : "";
  if (state === "refused") {
    return said(`The verifier refuses this device${why}. Until that is changed it checks nothing.`);
  }
  if (state === "offline") return said(`The verifier is not there${why}`);
  if (state === "late") return said(detail || "No word from the verifier");
  return "";
}

// For how long nothing has changed, in the steps that are shown; 0: not worth a word.
export function stillFor(seconds) {
  if (seconds < FIRST_SECONDS) return 0;
  return Math.floor(seconds / STEP_SECONDS) * STEP_SECONDS;
}

// When the reader last saw one answer change.
export class Signs {
  static heardAt; // of any answer: who works on another is not silent

  constructor(now) {
    this.changedAt = now;
  }

  // A chunk arrived; `changed`: it changed what the reader sees.
  heard(now, changed) {
    Signs.heardAt = now;
    if (changed) this.changedAt = now;
  }

  // The words for the reader, "" while they need none. Nothing is known of a verifier that is not
  // online: what is heard then is this device's own.
  words(now, isOnline) {
    const still = stillFor(now - this.changedAt);
    if (!still) return "";
    const works = isOnline && now - Signs.heardAt < FIRST_SECONDS;
    return works ? said(`the verifier is at work, ${still} s`) : `no word for ${still} s`;
  }
}
