// Figures of a turn, as edge_client/turn/stats.py. Times are in seconds.

export class Stats {
  firstToken = 0;
  /** Requests to the verifier: rounds of either kind. */
  calls = 0;
  /** Verified drafts of the device. */
  rounds = 0;
  drafted = 0;
  accepted = 0;
  offlineTokens = 0;
  tokens = 0;
  confirmed = 0;
  retracted = 0;
  resumes = 0;
  /** Of the target, as the answers tell. */
  forwards = 0;
  guessMessages = 0;

  /** @param {number} started */
  constructor(started) {
    this.started = started;
  }

  /** Take in events on their way to the user. @param {any[]} events @param {number} now */
  count(events, now) {
    for (const event of events) {
      const length = event.stop - event.start;
      if (event.event === "token") {
        this.tokens++;
        this.firstToken ||= now;
      } else if (event.event === "confirm") this.confirmed += length;
      else if (event.event === "retract") {
        this.retracted += length;
        this.tokens -= length;
      }
    }
  }

  /** Tokens a second so far. @param {number} now */
  speed(now) {
    return this.tokens / Math.max(1e-3, now - this.started);
  }

  /** @param {number} now */
  report(now) {
    const seconds = Math.max(1e-3, now - this.started);
    return {
      seconds,
      first_token_seconds: Math.max(0, this.firstToken - this.started),
      tokens: this.tokens,
      tokens_per_second: this.tokens / seconds,
      calls: this.calls,
      rounds: this.rounds,
      drafted: this.drafted,
      accepted: this.accepted,
      offline_tokens: this.offlineTokens,
      confirmed: this.confirmed,
      retracted: this.retracted,
      resumes: this.resumes,
      forwards: this.forwards,
      guess_messages: this.guessMessages,
    };
  }
}
