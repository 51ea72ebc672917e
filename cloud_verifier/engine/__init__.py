"""The thread that owns the model. Read in this order:

loop      takes a step, has it run, reports what became of it; the lock that both threads share
schedule  what runs next: rounds that are ready, pieces of prompts beside them
run       one step: slots are taken, one forward, what is accepted is committed and answered
draft     the server's own drafts, for streams that the device does not draft
records   the drafter's activation records of committed tokens, made in idle time

What sessions and the engine exchange is in `contract` (calls in, reports out) and `job` (a session's
slot, guesses and round). Each of the other files does one thing for those above: `queue` shares
forwards fairly between principals and `pacing` says how much may run beside them (`schedule`);
`holding` takes and gives back slots and `masks` makes those of grammars (`run`); `faults` counts what
raises (all of them).
"""
