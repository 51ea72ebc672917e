"""cloud-verifier: the websocket service that runs the target model for many edges at once.

The event loop's side, without torch:
    transport         websockets, health and metrics over HTTP, drain
    channel           one connection: messages in, answers out (`handshake`: its hello)
    service           all connections and sessions of the process
    sessions          sessions and their slots: live, detached, cold, gone
    rounds            sends rounds to the engine and their results to the session's history
    record_sender     sends activation records when bandwidth is left
    scheduler         what the model runs next: fair, bounded, without starvation; the interface between both sides
    interleaving      what may run between rounds: layers of prompts, records

The model's thread:
    engine            forwards of drafts and prompts, acceptance, commits
    recording         activation records of committed tokens
    stream_drafting   the server's own drafts
    model             loading
"""
