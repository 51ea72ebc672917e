// One turn as a pure machine, as edge_client/turn/machine.py: messages and time go in, actions come out. No I/O, no clock.
//
//   machine.linkUp(welcome, connection, now)      machine.linkDown(since, why, refused)
//   machine.receive(message, now)
//   machine.nextAction(now) ->
//     {kind: "send", messages}                    the shell sends them
//     {kind: "draft", ids, shape, quick}          the shell runs the drafter, then machine.ran(action, result, now)
//     {kind: "grow", ids, breadth, least}         the same: a tree of guesses
//     {kind: "write", ids}                        the same: a token written offline
//     {kind: "wait", until}                       the shell waits for news; null: without a limit
//     {kind: "drop"}                              the shell gives the connection up
//     {kind: "end", reason}                       the turn is over
//   machine.drain()                               what the user is told, at any time

import { Ahead } from "./ahead.js";
import { Moment } from "./deadlines.js";
import { message } from "./messages.js";
import { SessionState, classify } from "./reach.js";
import { Rounds } from "./rounds.js";
import { ProtocolError, safeLine, same } from "./text.js";

/** @typedef {import("./messages.js").Message} Message */
/** @typedef {{kind: string, [field: string]: any}} Action */
/** What a turn consists of.
 * @typedef {{transcript: import("./transcript.js").Transcript, sessionState: SessionState,
 *   controller: import("./controller.js").Controller, records: import("./records.js").Records,
 *   guard: import("./deadlines.js").OfflineGuard, deadlines: import("./deadlines.js").Deadlines,
 *   stats: import("./stats.js").Stats, reach: import("./reach.js").Reachability, left: Uint8Array[],
 *   draft: import("./controller.js").WhoDrafts, guesses: boolean}} Turn */

const COMPUTES_OTHERWISE = "the verifier that answers now computes another text than the one that began this answer";

const close = (/** @type {Uint8Array} */ session) => message("close", { session });

/** Decides what a turn does next. */
export class TurnMachine {
  /** `left` are sessions of earlier turns to close, once this turn's own is open. @param {Turn} turn */
  constructor({ transcript, sessionState, controller, records, guard, deadlines, stats, reach, left, draft, guesses }) {
    this.transcript = transcript;
    this.sessionState = sessionState;
    this.controller = controller;
    this.records = records;
    this.guard = guard;
    this.deadlines = deadlines;
    this.stats = stats;
    this.reach = reach;
    this.left = left;
    this.whoDrafts = draft;
    /** The plan for the next round, if it is already made. @type {import("./controller.js").Plan | null} */
    this.plan = null;
    /** @type {Message[]} */
    this.outbox = [];
    this.noDrafter = false;
    /** The stream under way when the drafter failed: it may wait for guesses, and the next one does not.
     * @type {Message | undefined} */
    this.unguessed = undefined;
    /** @type {number | null} */
    this.vocabSize = null;
    /** @type {string | null} */
    this.state = null;
    /** Whether the answer had ended, and its text is checked while nobody waits. */
    this.rechecks = false;
    /** The identity of what the verifier computes that began the turn. */
    this.computes = "";
    /** Whether the user was told that the verifier is reading. */
    this.reading = false;
    /** @type {any[]} */
    this.events = [];
    this.rounds = new Rounds(transcript, controller, records, stats);
    const wanted = guesses && (draft === "auto" || draft === "device");
    this.ahead = new Ahead(transcript, controller, deadlines, stats, wanted, draft === "auto");
    controller.begin();
  }

  /** The session of this turn; it is replaced if the logs differ. */
  get session() {
    return this.transcript.session;
  }

  // ---- the link

  /** A connection is up: open or resume the session on it. @param {Message} welcome @param {number} connection @param {number} now */
  linkUp(welcome, connection, now) {
    if (!this.goesOnWith(welcome.computes)) {
      this.reach.lost(COMPUTES_OTHERWISE, true);
      return;
    }
    this.reach.link = "up";
    this.vocabSize = welcome.vocab_size;
    this.controller.agreed(welcome);
    this.ahead.agreed(welcome);
    this.rounds.recordService = welcome.records !== null;
    this.deadlines.connected();
    if (this.usable) this.bringUp(connection, now);
  }

  /** Whether this verifier computes what the one computed that began the turn: else the two would make one verified text of
   * two. @param {string} computes */
  goesOnWith(computes) {
    this.computes ||= computes;
    return !computes || computes === this.computes;
  }

  /** The connection is down; `refused`: no attempt before the next turn. @param {number} since @param {string} why @param {boolean} refused */
  linkDown(since, why, refused = false) {
    if (this.reach.lost(why, refused)) this.giveUp("the connection is lost again and again");
    this.left.push(...this.unsentCloses());
    this.outbox = []; // before its resume, another connection would refuse the session's messages
    this.deadlines.lost(since);
    this.sessionState.lost();
    this.ahead.lost();
    this.plan = null;
  }

  /** Take in a message that arrived at `now`. @param {Message} answer @param {number} now */
  receive(answer, now) {
    if (answer.kind === "activations") this.records.arrived.push(answer);
    else if (!answer.session || !same(answer.session, this.session.id)) return; // of an abandoned session
    else if (answer.kind === "error") this.refused(answer, now);
    else {
      let event;
      try {
        event = this.session.receive(answer);
      } catch (error) {
        if (!(error instanceof ProtocolError)) throw error;
        return this.broken(error.message, now);
      }
      if (event?.kind === "ready") this.sessionState.established = true;
      else if (event?.kind === "advanced") this.advanced(event, now);
      else if (event?.kind === "recovered") this.recovered(event, now);
      else if (event?.kind === "working") this.working(event, now);
    }
  }

  // ---- what the drafter has done

  /** The drafter's result; void if the turn has changed meanwhile. @param {Action} action @param {any} result @param {number} now */
  ran(action, result, now) {
    const { log } = this.session;
    if (action.kind === "draft") {
      const may = this.mayAsk && !this.transcript.provisional.length;
      if (may && action.ids === log && result.tokens[0] === log[log.length - 1]) this.request(this.rounds.drafted(result), now);
    } else if (action.kind === "grow") {
      if (action.ids === log) this.ahead.grew(log.length, result);
    } else if (this.mayWrite && same(action.ids, this.transcript.ids)) this.write(result, now);
  }

  /** @param {number} token @param {number} now */
  write(token, now) {
    this.transcript.extend(token);
    this.stats.offlineTokens++;
    this.deadlines.written(now);
    this.plan = null;
    const warning = this.guard.warning(this.transcript.provisional.length);
    if (warning) this.notice(warning);
  }

  /** The turn goes on without a drafter: the verifier drafts, and nothing is written offline. @param {string} why */
  drafterFailed(why) {
    this.notice(`${why}: the verifier drafts the rest of this answer`);
    this.whoDrafts = this.controller.canStream ? "server" : "single";
    this.noDrafter = true;
    this.ahead.wanted = false;
    this.plan = null;
    this.unguessed = this.session.streaming;
    if (this.usable) this.cancelUnguessed();
  }

  // ---- what to do

  /** The most useful thing to do now. @param {number} now @returns {Action} */
  nextAction(now) {
    const moment = new Moment(now);
    /** @type {Action | null} */
    let action = null;
    if (this.usable) {
      const again = this.sessionState.due(moment);
      if (again.length) this.repeat(again, now);
      else if (this.session.unsettled.length && moment.reached(this.deadlines.giveUpAt())) return { kind: "drop" };
    }
    if (this.records.arrived.length && this.rounds.lacksRecords) this.storeRecords(); // the next draft waits for them
    if (!this.outbox.length && this.mayAsk) {
      const asked = this.ask(moment);
      if (asked?.kind === "draft") action = asked;
      else if (asked) this.request(asked, now);
      if (asked) this.say("online");
    }
    if (!this.outbox.length && !action) {
      action = this.transcript.over ? { kind: "end", reason: this.reason() } : this.whileWaiting(moment);
    }
    if (this.outbox.length) {
      const messages = this.outbox;
      this.outbox = [];
      return { kind: "send", messages };
    }
    return action ?? { kind: "wait", until: moment.next };
  }

  /** The next round, or the draft to make for it; null if it must wait. @param {Moment} moment */
  ask(moment) {
    const check = this.rounds.check();
    if (check) return check;
    const plan = (this.plan ??= this.nextPlan());
    if (plan.whoDrafts === "single" || (plan.whoDrafts === "device" && !this.ahead.on)) return this.rounds.next(plan, moment);
    return this.ahead.begin(plan);
  }

  nextPlan() {
    const blind = !this.transcript.length && this.records.misses(this.transcript.rules.start);
    return this.controller.plan(this.transcript.remaining, this.whoDrafts, { blind, guesses: this.ahead.on });
  }

  /** The events for the user since the last call. */
  drain() {
    const events = [...this.events, ...this.transcript.drain()];
    this.events = [];
    return events;
  }

  /** The user has read the events: answers that arrived meanwhile are not late. @param {number} since @param {number} now */
  eventsRead(since, now) {
    this.deadlines.read(since, now);
  }

  /** The turn is over: store remaining records; returns the last messages to send. */
  lastMessages() {
    this.storeRecords();
    const ack = this.reach.link === "up" ? this.records.flow.acknowledge() : null;
    return ack ? [...this.outbox, ack] : this.outbox;
  }

  /** Sessions to close after the turn was cancelled. @returns {Uint8Array[]} */
  unsentCloses() {
    return this.outbox.filter((asked) => asked.kind === "close").map((asked) => asked.session);
  }

  /** Wait once more for the check of unverified text at the end. @param {number} now */
  continueSettling(now) {
    this.rechecks = true;
    this.reach.tryAgain();
    this.deadlines.restart(now);
  }

  /** Whether the verifier can do something for this turn. */
  get usable() {
    return this.reach.usable && !this.transcript.over;
  }

  get mayAsk() {
    return this.usable && this.sessionState.usable && !this.session.busy;
  }

  /** Send a round, and set the time after which its answer is late. @param {Message} request @param {number} now */
  request(request, now) {
    this.stats.calls++;
    this.stats.drafted += request.kind === "verify" ? request.tokens.length - 1 : 0;
    this.plan = null;
    this.deadlines.asked(now);
    this.outbox.push(request);
  }

  /** Send messages again; this does not restart `offlineAfter`. @param {Message[]} messages @param {number} now */
  repeat(messages, now) {
    this.outbox.push(...messages);
    this.deadlines.askedAt = now;
    if (this.sessionState.established) this.cancelUnguessed();
  }

  /** End the stream that may wait for guesses, on each connection until it has ended. */
  cancelUnguessed() {
    const stream = this.session.streaming, before = this.unguessed;
    if (!stream || !before || stream.round !== before.round || !same(stream.session, before.session)) return;
    this.outbox.push(message("cancel", { session: stream.session, round: stream.round }));
  }

  /** @param {number} connection @param {number} now */
  bringUp(connection, now) {
    this.agree();
    this.repeat(this.sessionState.bringUp(connection), now);
    for (let old = this.left.pop(); old; old = this.left.pop()) this.outbox.push(close(old));
  }

  /** What device and verifier have agreed on holds for this session. */
  agree() {
    this.session.records = this.records.dtype;
    if (this.vocabSize !== null) this.session.vocabSize = this.vocabSize;
  }

  // ---- what an answer means

  /** @param {any} event @param {number} now */
  advanced(event, now) {
    const waited = now - this.deadlines.askedAt;
    event = credible(event, 1000 * Math.max(0, waited));
    const { unread } = this.deadlines;
    const { tokens, path } = event;
    if (path.length) this.rounds.answered(event, waited, unread > 0);
    if (tokens.length && unread) {
      this.controller.prefill.add(event.queue_ms / 1000 / unread); // the first verdict waited for the prompt
      this.deadlines.unread = 0;
    }
    if (!path.length) this.ahead.answered(event, now);
    if (tokens.length) {
      this.stats.forwards++;
      this.progressed(now, (event.queue_ms + event.forward_ms) / 1000);
    } else if (event.done) this.tryAgain(now); // after a round without tokens do not ask again at once
    this.absorb(now);
  }

  /** @param {any} event @param {number} now */
  recovered(event, now) {
    this.rounds.forget();
    if (event.outcome === "gone") return this.reopen(now);
    this.stats.resumes++;
    this.sessionState.established = true;
    if (event.tokens.length) this.progressed(now);
    if (this.absorb(now)) this.repeat(event.resend, now);
  }

  /** The verifier is at it; the user is told how far it is with reading. @param {any} event @param {number} now */
  working({ done, total }, now) {
    this.deadlines.heard(done, now);
    const reads = done < total;
    if (reads || this.reading) this.events.push({ event: "progress", done, total });
    this.reading = reads;
  }

  /** @param {number} now @param {number} server */
  progressed(now, server = 0) {
    this.reading = false;
    this.say("online");
    this.reach.progressed();
    this.deadlines.progressed(now, server);
  }

  /** @param {Message} error @param {number} now */
  refused(error, now) {
    if (error.round && !this.session.asked(error.round)) return; // it has been answered meanwhile
    switch (classify(error.code)) {
      case "later":
        this.session.receive(error);
        return this.pause(now, error.retry_after_ms / 1000);
      case "unknown":
        // of a round that was sent after an opening: the opening's own answer counts
        if (error.round && this.session.opening) return;
        this.session.receive(error);
        return this.reopen(now);
      case "broken":
        return this.broken(error.message, now);
      default:
        this.session.receive(error);
        this.giveUp(error.message);
    }
  }

  /** After a pause, unanswered requests are sent again, or a new round. @param {number} now @param {number} askedWait */
  pause(now, askedWait = 0) {
    this.reach.retry.failed(now, askedWait);
    this.sessionState.repeat(this.reach.retry.notBefore);
  }

  /** The same, for errors that should not happen: with a limit. @param {number} now */
  tryAgain(now) {
    if (this.reach.setback()) this.giveUp("the verifier answers without progress");
    else this.pause(now);
  }

  /** The verifier has lost the session; its opening is among the unsettled requests. @param {number} now */
  reopen(now) {
    this.tryAgain(now);
    if (this.reach.setbacks === 1) this.sessionState.repeat(now);
  }

  /** The logs differ, or the verifier broke a rule: continue from our log, which is complete. @param {string} why @param {number} now */
  broken(why, now) {
    if (!this.reach.setbacks) this.notice(`a new session is opened: ${safeLine(why)}`);
    this.transcript.beginAnew();
    this.tryAgain(now);
    this.absorb(now);
  }

  /** @param {string} why */
  giveUp(why) {
    this.reach.givenUp = safeLine(why);
    this.session.unsettled = [];
  }

  /** Reconcile verified and provisional text; false if the turn continues in another session. @param {number} now */
  absorb(now) {
    this.transcript.absorb();
    if (!this.transcript.provisional.length) this.guard.warned = false;
    const old = this.transcript.superseded;
    if (!old) return true;
    this.transcript.superseded = null;
    this.agree();
    this.rounds.forget();
    this.ahead.lost();
    this.plan = null;
    this.records.truncate(this.session.held.end);
    const before = this.sessionState;
    this.sessionState = new SessionState(this.session);
    if (this.reach.link !== "up") return false;
    if (this.usable) {
      const opening = this.sessionState.bringUp(before.connection);
      if (before.againAt === null) this.repeat(opening, now); // first the new session: it shares the cached prefix
      else this.sessionState.repeat(before.againAt);
    }
    this.outbox.push(close(old.id));
    return false;
  }

  // ---- while nothing can be asked

  get mayWrite() {
    const { transcript } = this;
    return !this.noDrafter && !transcript.finish && !this.guard.stops(transcript.provisional);
  }

  /** Write offline after `offlineAfter`; until then use the time. @param {Moment} moment @returns {Action | null} */
  whileWaiting(moment) {
    const alone = this.reach.hopeless;
    if (this.mayWrite) {
      if (alone || moment.reached(this.deadlines.writeAt())) {
        this.say(...this.reach.news());
        return { kind: "write", ids: this.transcript.ids };
      }
    } else {
      const unreachable = this.reach.link === "down" || this.sessionState.againAt !== null;
      const slow = !unreachable && (!this.transcript.length || this.rechecks);
      const over = alone || moment.reached(this.deadlines.endAt(moment.now, slow));
      if (over || unreachable) this.say(...this.reach.news());
      if (over) return { kind: "end", reason: this.reason() };
    }
    this.useTheWait(moment.now);
    if (!(this.usable && this.sessionState.usable && this.ahead.on)) return null;
    const useful = this.ahead.next(moment);
    if (useful?.kind === "grow") return useful;
    if (useful) this.outbox.push(useful);
    return null;
  }

  /** Idle: store records, plan the next round. @param {number} now */
  useTheWait(now) {
    this.storeRecords();
    if (this.reach.link !== "up") return;
    if (this.session.busy && !this.plan && this.transcript.length) this.plan = this.nextPlan();
    const ack = this.records.flow.acknowledge();
    if (!ack) return;
    this.outbox.push(ack);
    const change = this.records.adjust(this.session, this.stats.speed(now));
    if (change) this.outbox.push(change);
  }

  storeRecords() {
    const { start, maxNewTokens } = this.transcript.rules;
    try {
      this.records.store(this.session, start + maxNewTokens);
    } catch (error) {
      if (error instanceof ProtocolError) this.giveUp(error.message);
      else {
        // tokens are exact whatever happens to records
        this.records.buffer = null;
        this.notice(`the store of activation records failed: ${safeLine(String(error))}`);
      }
    }
  }

  /** @param {string} state @param {string} detail */
  say(state, detail = "") {
    if (state === this.state) return;
    this.state = state;
    this.events.push({ event: "link", state, detail });
  }

  /** @param {string} message */
  notice(message) {
    this.events.push({ event: "notice", message });
  }

  reason() {
    if (this.transcript.finish) return this.transcript.finish;
    return this.guard.stops(this.transcript.provisional) ? "guard" : "link";
  }
}

/** Cap the server's reported times at the observed latency: the next deadline depends on them. @param {any} event @param {number} waited ms */
function credible(event, waited) {
  if (event.queue_ms + event.forward_ms <= waited) return event;
  const forward_ms = Math.min(event.forward_ms, waited);
  return { ...event, forward_ms, queue_ms: Math.min(event.queue_ms, waited - forward_ms) };
}
