// Plays what went into Python's turn machine to the browser's, and returns what came out.

import { Controller } from "../../edge_client/web/turn/controller.js";
import { Deadlines, OfflineGuard } from "../../edge_client/web/turn/deadlines.js";
import { GuessTreeGrower } from "../../edge_client/web/turn/guesses.js";
import { TurnMachine } from "../../edge_client/web/turn/machine.js";
import { clientFrame, decodeServer } from "../../edge_client/web/turn/messages.js";
import { Reachability, Retry, SessionState } from "../../edge_client/web/turn/reach.js";
import { Records } from "../../edge_client/web/turn/records.js";
import { ClientSession } from "../../edge_client/web/turn/session.js";
import { Stats } from "../../edge_client/web/turn/stats.js";
import { Transcript } from "../../edge_client/web/turn/transcript.js";

const letters = (ids) => String.fromCharCode(...ids.map((id) => 64 + (id % 60)));
const frames = (messages) => messages.map((message) => clientFrame(message));
const GREEDY = { temperature: 0, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, seed: 0 };

export class Replay {
  sessions = 0;
  controller = new Controller();
  machine = null;
  state = null;
  action = null;
  jitter = [];

  newId = () => {
    const id = new Uint8Array(16);
    new DataView(id.buffer).setUint32(12, this.sessions++);
    return id;
  };

  begin({ session, state, append, rules, draft, guesses, patience, stop_at, warn_at, linked, now, left }) {
    if (append) this.machine.session.append(append.ids, { maxNewTokens: append.max_new_tokens, stop: append.stop, ignoreEos: false });
    if (state === "current") this.state = this.machine.sessionState;
    if (state === "new") {
      this.state = new SessionState(new ClientSession({ ...session, log: [...session.log], id: this.newId(), sampling: GREEDY }));
    }
    const own = this.state.session;
    const transcript = new Transcript(own, { ...rules, eosIds: new Set(rules.eosIds) }, letters, this.newId);
    const unread = rules.start - own.settled;
    this.machine = new TurnMachine({
      transcript,
      sessionState: this.state,
      controller: this.controller,
      records: new Records(null),
      guard: new OfflineGuard({ warnAt: warn_at, stopAt: stop_at, worthless: false }),
      deadlines: new Deadlines(patience, this.controller, now, unread),
      stats: new Stats(now),
      reach: new Reachability(linked, new Retry(0.1, 1, () => this.jitter.shift())),
      left,
      draft,
      guesses,
    });
  }

  do({ op, jitter, ...about }) {
    const { machine } = this, { now } = about;
    this.jitter.push(...jitter);
    switch (op) {
      case "begin":
        return this.begin(about);
      case "link_up":
        Object.assign(this.controller.rtt, about.rtt);
        return machine.linkUp(decodeServer(about.welcome), about.connection, now);
      case "link_down":
        return machine.linkDown(about.since, about.why ?? "", about.refused ?? false);
      case "receive":
        return machine.receive(decodeServer(about.frame), now);
      case "next_action": {
        this.action = machine.nextAction(now);
        const { kind, messages, ...rest } = this.action;
        return messages ? { kind, frames: frames(messages) } : { kind, ...rest, ids: rest.ids && [...rest.ids] };
      }
      case "ran": {
        let { result } = about;
        if (result?.open) {
          const { root, open, depths, tokens, parents, scores } = result;
          result = Object.assign(new GuessTreeGrower(root), { open: new Set(open), depths, tree: { tokens, parents, scores } });
        }
        return machine.ran(this.action, result, now);
      }
      case "drain":
        return machine.drain();
      case "last_messages":
        return frames(machine.lastMessages());
      case "continue_settling":
        return machine.continueSettling(now);
      case "events_read":
        return machine.eventsRead(about.since, now);
      case "drafter_failed":
        return machine.drafterFailed(about.why);
      default:
        throw new Error(`no ${op}`);
    }
  }
}
