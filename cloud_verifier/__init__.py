"""cloud-verifier: the websocket service that runs the target model for many edges at once.

The event loop's side, without torch:
    transport         websockets, health and metrics over HTTP, drain
    channel           one connection: messages in, answers out (`handshake`: its hello)
    service           all connections and sessions of the process
    sessions          sessions and their slots: live, detached, cold, gone
    rounds            sends rounds to the engine and their results to the session's history
    record_sender     sends activation records when bandwidth is left
    engine.thread     the interface between both sides: lock, clock and waiting around the scheduler

Pure:
    engine.scheduler  what the model runs next, one step at a time
    engine.queue      rounds, shared fairly between principals
    engine.pacing     how many prompt tokens and records run beside rounds

The model's thread:
    engine.core       one step in, one outcome out: forwards, acceptance, commits, reports
    engine.recording  activation records of committed tokens
    engine.stream_drafting  the server's own drafts
    model             loading
"""
