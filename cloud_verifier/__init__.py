"""cloud-verifier: the websocket service that runs the target model for many edges at once.

The event loop's side, without torch:
    serving           sockets, TLS, admission: everything before a message
    sessions          connections, sessions and their slots, budgets, records on their way out
    engine.contract   what sessions ask of an engine, and what it reports
    openai            the endpoint for clients without a drafter

Pure:
    sessions.session  one session: a token log, and rounds that settle once
    engine.schedule   what the model runs next, one step at a time

The model's thread:
    engine.loop       takes one step after another, and says what became of it
    engine.run        one step: forward, acceptance, commit, answers
    engine.draft      the server's own drafts
    engine.records    activation records of committed tokens
    model             loading
"""
