"""The server's side of a session, without I/O: a token log, rounds that settle once, and the replay of their answers.

A request is *admitted* (run it), *replayed* (it has settled before: here is the same answer) or refused. So a message
may be lost or sent twice without changing the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moa.logprobs import row_bytes
from moa.wire.codec import chain_hash
from moa.wire.codes import Code, Refusal
from moa.wire.finish import TurnRules
from moa.wire.messages import Append, Finish, Open, Opened, Resume, Resumed, Stream, StreamTokens, Verdict, Verify

RUNNING: Literal["running"] = "running"
_RETOLD_BYTES = 128 * 1024
"""Most bytes of log-probabilities in a repeated answer; those of older tokens are left out."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a request waited and ran, and how many sessions shared the pass."""

    queue_ms: float = 0.0
    forward_ms: float = 0.0
    batch: int = 1


class History:
    """Token log and rounds of one session."""

    def __init__(
        self,
        message: Open,
        ids: Sequence[int],
        *,
        eos_ids: frozenset[int],
        max_context: int,
    ) -> None:
        self.session = message.session
        self.ids = list(ids)
        self.round = message.round
        """Last settled round."""
        self.running: Verify | Stream | None = None
        self.finish: Finish = ""
        self.epoch = 0
        self.logprobs = message.logprobs
        """Number of likeliest tokens with log-probabilities in this turn; -1: none."""
        self.rows = bytearray()
        """Log-probabilities of the log's last tokens."""
        self._eos_ids = eos_ids
        self._opened = (len(ids), chain_hash(ids))
        self._appended: tuple[int, int] | None = None
        self._settled: tuple[Verify | Stream, Verdict | StreamTokens] | None = None
        self.rules = TurnRules(
            start=len(ids) - message.generated,
            max_new_tokens=message.max_new_tokens,
            max_context=max_context,
            eos_ids=frozenset() if message.ignore_eos else eos_ids,
            stop=tuple(message.stop),
        )

    @property
    def base(self) -> int:
        """Position of the pending token."""
        return len(self.ids) - 1

    def reopen(self, ids: Sequence[int]) -> Opened:
        """Answer an `Open`, also a repeated one."""
        if (len(ids), chain_hash(ids)) != self._opened:
            raise Refusal(Code.CONFLICT, "a session of this id is open with another prompt", session=self.session)
        return Opened(self.session, len(ids), self.epoch)

    def append(self, message: Append) -> Opened:
        """Start the next turn; a repetition changes nothing."""
        ids, base = message.ids, message.base
        answer = Opened(self.session, base + len(ids), self.epoch)
        if self._appended == (base, len(ids)) and self.ids[base : base + len(ids)] == ids:
            return answer
        if self.running is not None:
            raise self._conflict(f"round {self.running.round} is running: cancel it or wait")
        if base != len(self.ids):
            raise self._conflict(f"append at {base}, but the log has {len(self.ids)} tokens")
        if base + len(ids) > self.rules.max_context:
            raise Refusal(
                Code.LIMIT,
                f"{base + len(ids)} tokens in the context, at most {self.rules.max_context}",
                limit="max_context_tokens",
                session=self.session,
            )
        self._appended = (base, len(ids))
        self.ids += ids
        self.finish = ""
        self.logprobs, self.rows = message.logprobs, bytearray()
        self.rules = replace(
            self.rules,
            start=len(self.ids),
            max_new_tokens=message.max_new_tokens,
            eos_ids=frozenset() if message.ignore_eos else self._eos_ids,
            stop=tuple(message.stop),
        )
        return answer

    def admit(self, message: Verify | Stream) -> Verdict | StreamTokens | Literal["running"] | None:
        """None: run the round. An answer: it has settled already. "running": its answer follows."""
        if self.running is not None:
            if self.running == message:
                return RUNNING
            raise self._conflict(f"round {self.running.round} is still running", message.round)
        if message.round == self.round and self._settled is not None and self._settled[0] == message:
            return self._settled[1]
        if message.round != self.round + 1:
            raise self._conflict(f"round {message.round} after round {self.round}", message.round)
        if self.finish:
            raise self._conflict(f"the turn is over ({self.finish}): append first", message.round)
        if message.base != self.base:
            raise self._conflict(f"base {message.base}, but the pending token is at {self.base}", message.round)
        if isinstance(message, Verify) and message.tokens[0] != self.ids[-1]:
            raise self._conflict(f"the pending token is {self.ids[-1]}, not {message.tokens[0]}", message.round)
        self.running = message
        return None

    def settle(
        self, path: Sequence[int], next_token: int, finish: Finish, timing: Timing, logprobs: bytes = b""
    ) -> Verdict:
        """Take the target's verdict on the running round, cut at the turn's end by `cut_path`, into the log."""
        verify = self.running
        if not isinstance(verify, Verify):
            raise self._conflict("no verify round is running")
        verdict = Verdict(
            session=self.session,
            round=verify.round,
            base=verify.base,
            path=list(path),
            next_token=next_token,
            finish=finish,
            queue_ms=timing.queue_ms,
            forward_ms=timing.forward_ms,
            batch=timing.batch,
            logprobs=logprobs,
        )
        self.rows += logprobs
        self.ids += [*(verify.tokens[node] for node in path[1:]), next_token]
        self.finish, self.round, self.running = finish, verify.round, None
        self._settled = (verify, verdict)
        return verdict

    def emit(
        self,
        new: Sequence[int],
        finish: Finish,
        timing: Timing,
        *,
        drafted: int,
        done: bool,
        logprobs: bytes = b"",
        foreseen: int = 0,
    ) -> StreamTokens:
        """Take tokens of the running stream into the log; `done` ends the round after them."""
        stream = self.running
        if not isinstance(stream, Stream):
            raise self._conflict("no stream round is running")
        base = self.base
        self.ids += new
        self.rows += logprobs
        self.finish = finish
        if done:
            self.round, self.running = stream.round, None
            won = self.ids[stream.base + 1 :]
            everything = StreamTokens(
                self.session, stream.round, stream.base, won, True, finish, logprobs=self._told(len(won))
            )
            self._settled = (stream, everything)
        return StreamTokens(
            session=self.session,
            round=stream.round,
            base=base,
            tokens=list(new),
            done=done,
            finish=finish,
            drafted=drafted,
            foreseen=foreseen,
            queue_ms=timing.queue_ms,
            forward_ms=timing.forward_ms,
            logprobs=logprobs,
        )

    def give_up(self) -> None:
        """The running round was not run (deadline, cancel, no room): its number may be used again."""
        self.running = None

    def resume(self, message: Resume, outcome: Literal["resumed", "reprefilled"]) -> Resumed:
        """Answer a `Resume` of a session that is known here."""
        if message.length > len(self.ids) or chain_hash(self.ids[: message.length]) != message.chain:
            raise self._conflict("the logs differ: open the session anew")
        return Resumed(
            session=self.session,
            outcome=outcome,
            length=len(self.ids),
            round=self.round,
            tail=self.ids[message.length :],
            finish=self.finish,
            running=self.running.round if self.running is not None else 0,
            epoch=self.epoch,
            logprobs=self._told(len(self.ids) - message.length),
        )

    def _told(self, tokens: int) -> bytes:
        """Log-probabilities of the last so many tokens, as far as they are known and fit into one answer."""
        if (row := row_bytes(self.logprobs)) == 0:
            return b""
        start = len(self.rows) - row * min(tokens, _RETOLD_BYTES // row)
        return bytes(self.rows[max(0, start) :])

    def _conflict(self, message: str, round: int = 0) -> Refusal:
        return Refusal(Code.CONFLICT, message, session=self.session, round=round)
