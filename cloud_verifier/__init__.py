"""cloud-verifier: the websocket service that runs the target model for many edges at once.

The event loop's side, without torch:
    serving           sockets, TLS, admission: everything before a message
    sessions          connections, sessions and their slots, budgets, records on their way out
    engine.workload   the interface between both sides: lock, clock and waiting around the scheduler
    openai            the endpoint for clients without a drafter

Pure:
    sessions.session  one session: a token log, and rounds that settle once
    engine.scheduler  what the model runs next, one step at a time (`queue`: fair shares; `pacing`: work that can wait)

The model's thread:
    engine.core       one step in, one outcome out: forwards, acceptance, commits, reports
    engine.recording  activation records of committed tokens
    engine.stream_drafting  the server's own drafts
    model             loading
"""
