// Turns in the browser's own database: a page that was killed in mid-answer finds all tokens again.

const STORE = "turns";
const DAY = 86_400_000;

function wish(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export class Turns {
  static async open() {
    const request = indexedDB.open("moa-device", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    const turns = new Turns();
    turns.database = await wish(request);
    await turns.#prune();
    return turns;
  }

  get(id) { return wish(this.#table("readonly").get(id)); }
  put(turn) { return wish(this.#table("readwrite").put(turn)); }

  // The text of an answer is the page's to keep; what is here is needed until the answer is verified.
  async #prune() {
    const old = (await wish(this.#table("readonly").getAll())).filter(({ at, verified }) => Date.now() - at > (verified ? DAY : 30 * DAY));
    for (const { id } of old) await wish(this.#table("readwrite").delete(id));
  }

  #table(mode) { return this.database.transaction(STORE, mode).objectStore(STORE); }
}
