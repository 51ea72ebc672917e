"""cloud-verifier: the websocket service that runs the target model for many edges at once.

The event loop's side, without torch:
    transport   websockets, health and metrics over HTTP, drain
    channel     one connection: messages in, answers out (`greeting`: its hello)
    service     all connections and sessions of the process
    sessions    who holds a slot: live, detached, cold, gone
    rounds      a round's way to the engine and back into the session's history
    courier     activation records, sent when the link has room
    scheduler   what the model runs next: fair, bounded, never starved; also the border to the other side

The side of the one thread that owns the model:
    engine      forwards of drafts and prompts, accept rule, commits
    recording   activation records of committed tokens
    streaming   drafts by the server itself
    model       loading
"""
