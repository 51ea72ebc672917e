"""Answers for the endpoint: an `EdgeClient`'s events, with token positions converted to text
positions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, cast

from msgspec.structs import replace

from edge_client.client import EdgeClient
from edge_client.conversation import Conversation
from edge_client.events import (
    Adopt,
    Confirm,
    Done,
    Event,
    Link,
    Notice,
    Progress,
    Prompt,
    Reason,
    Retract,
    Token,
)
from edge_client.link.plain_get import why_unready
from edge_client.link.state import state_of
from edge_client.screen.words import named, toy_of, whose_tokens
from edge_client.settings import TurnChanges
from edge_client.text.codec import TextCodec
from edge_client.turn.reachability import RATE_USED_UP, not_passed_on
from moa.api.answer import (
    SAMPLING_FIELDS,
    AnswerEvent,
    AnswerRequest,
    Began,
    Counts,
    Cut,
    Encoded,
    Ended,
    LinkNews,
    Note,
    Piece,
    Reading,
    Scored,
    Verified,
)
from moa.api.encoding import answer_limit, encoded
from moa.api.errors import ApiError, bad
from moa.api.logprobs import scored
from moa.api.present import Patience, next_in_time
from moa.errors import UsageError
from moa.logprobs import TokenLogprobs
from moa.process.rare_lines import RareLines
from moa.safe_text import safe_line
from moa.sampling import ADJUSTMENTS
from moa.text_stream import Decoder, common_prefix, text_after
from moa.wire.messages import Welcome

_FIGURES = (
    "seconds",
    "first_token_seconds",
    "rounds",
    "offline_tokens",
    "confirmed",
    "retracted",
    "adopted",
    "resumes",
    "rtt_ms",
    "sent_bytes",
    "received_bytes",
    "upstream_usage",
)
_ASKED = (*SAMPLING_FIELDS, "stop", "ignore_eos", "logprobs")
"""Settings that a request has by the same name."""
_MOST_RESTING = 2
"""Conversations that are kept after their answers. A program sends a chat from its beginning with
each question: what goes on with one of these need not be read again, at either end. Two, because a
program may ask something else meanwhile, such as for a title; no more, because each holds a slot at
the verifier and a cache here."""
_TROUBLE = {
    "none": "there is no verifier",
    "connecting": "{} is not reached yet",
    "late": "{} did not answer in time",
    "limited": RATE_USED_UP,
    "offline": "{} is not reached",
    "refused": "{} refuses",
}
"""What a state of the link means for an answer, where no more is said of it, by who verifies."""
_STOPPED = "this device stopped: its text repeats itself, or more of it would be unreliable"
"""Why an answer ends that the guard of offline text has ended."""
_STOPPED_BY_LIMIT = (
    "this device stopped: it writes {} unverified tokens at most (max_offline_tokens)"
)
"""The same where the user has set the limit."""
log = logging.getLogger("moa.edge")
_LEAST_COMMON = 16
"""Tokens at the beginning of a prompt that a conversation must have to be gone on with."""
_FIRST_SECONDS = 20.0
"""Least wait for a first token beyond the usual, where the device cannot write; clients give up
after 30 to 60."""


class EdgeAnswerer:
    """Answers with an open client."""

    def __init__(self, client: EdgeClient, model: str = "") -> None:
        """Answer with this client. `model` is the target's name for programs; without one it is
        what is known of it."""
        self._client = client
        self._model = model
        self._alone = RareLines(log)
        """Lines about answers that the device wrote alone although the link is up."""
        self._full = RareLines(log)
        """Lines about answers that end where this device's context is full."""
        self._resting: list[tuple[str, Conversation]] = []
        """Conversations whose answers are over, the latest last, each with the principal whose it
        is: how fast an answer comes must tell nobody what another one has asked."""

    @property
    def model(self) -> str:
        """The target's name, because clients get its text: the upstream's own, where there is one
        and it has said it, else that of the model that the bundle was made for."""
        upstreams = self._client.settings.upstream_model
        return self._model or upstreams or named(self._behind or self.bundles_model)

    def more_names(self) -> list[str]:
        """How programs may call the model, too: the upstream's by its whole name or the last part
        of it, and by any (`*`) while the upstream has not said which model it has. A program that
        names the upstream's model is answered where this device starts while the upstream is away."""
        settings = self._client.settings
        if not settings.upstream:
            return []
        known = [one for one in (settings.upstream_model, self._behind) if one]
        return [*known, *map(named, known)] or ["*"]

    @property
    def _behind(self) -> str:
        """What the engine behind the verifier calls its model; empty: not known."""
        link = self._client.link
        return "" if link is None else safe_line(link.behind.model)

    @property
    def _verifier(self) -> str:
        """Who verifies, in words."""
        return self._client.settings.who_verifies

    @property
    def bundles_model(self) -> str:
        """Where the model came from that the bundle was made for."""
        return self._client.device.bundle.manifest.target.source

    @property
    def tokenizer(self) -> TextCodec:
        """The bundle's."""
        return self._client.device.codec

    @property
    def context(self) -> int:
        """The target's, or less where the verifier has less."""
        return self._client.shared.max_context

    @property
    def vocabulary(self) -> int:
        """The target's."""
        return self._client.device.bundle.manifest.target.facts.vocab_size

    async def encode(self, ask: AnswerRequest) -> Encoded:
        """Returns a request's prompt in tokens, with its grammar and its predicted text."""
        client = self._client
        try:
            return await encoded(
                client.device.codec,
                ask,
                context=client.shared.max_context,
                vocabulary=client.device.bundle.manifest.target.facts.vocab_size,
                longest=self._longest(ask),
            )
        except ApiError as error:
            whose = client.shared.whose_context
            if error.code != "context_length_exceeded" or not whose:
                raise
            raise bad(f"{error}: {whose}", error.param, error.code) from None

    async def admit(self, ask: AnswerRequest, encoded: Encoded) -> None:
        """Compile the grammar, which is kept for the answer."""
        if encoded.grammar is not None:
            await self._client.device.grammars.matcher(encoded.grammar, len(encoded.ids))

    async def answer(
        self, ask: AnswerRequest, encoded: Encoded
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the events of one answer. `ask` is the client's request, `encoded` its prompt in
        tokens."""
        self._check_features(ask, encoded)
        codec = self._client.device.codec
        changes = changes_of(ask, self._longest(ask))
        # It converts token positions to characters.
        marks = Marks(
            codec,
            codec.eos_ids,
            who_verifies=self._verifier,
            max_offline_tokens=self._client.settings.max_offline_tokens,
        )
        clock = asyncio.get_running_loop().time
        patience = self._patience(ask, len(encoded.ids), clock())
        async with self._conversation(ask.principal, encoded.ids) as conversation:
            turn = conversation.generate(
                ids=encoded.ids,
                messages=encoded.messages,
                prediction=() if ask.was_written else encoded.prediction,
                written=self._written(ask, encoded),
                rechecks=ask.was_written,
                grammar=encoded.grammar,
                **changes,
            )
            async with contextlib.aclosing(turn):
                while (event := await next_in_time(turn, patience)) is not None:
                    told = marks.take(event)
                    patience.trouble = marks.trouble
                    patience.refused = marks.refused
                    if told is None:
                        continue
                    sent = clock()
                    patience.take(told, sent)
                    if isinstance(told, Began):
                        told = replace(told, thinking=encoded.thinking)
                    if isinstance(told, Ended):
                        self._tell_alone(told.why, ask.peer)
                        if told.verified or ask.mode != "hold":  # else nobody sees where it ends
                            told = self._with_whose_limit(told, ask.peer)
                    yield told
                    # While the client reads, nobody waits for the next event.
                    patience.client_took(clock() - sent)

    def _tell_alone(self, why: str, peer: str) -> None:
        """Log why an answer is not verified, where the state of the link does not tell: that is
        logged whenever it changes. Empty: it is verified, or nobody knows."""
        link = self._client.link
        if why and link is not None and state_of(link, perf_counter())[0] == "online":
            line = f"an answer is this device's own, or a part of it: {why}"
            self._alone.warn("alone", line, peer, "alone")

    def _with_whose_limit(self, ended: Ended, peer: str) -> Ended:
        """Returns the end of an answer, which says so where a limit has cut it that counts other
        tokens than those of the model that answers. A full context is logged, too: nobody asked
        for that limit."""
        shared = self._client.shared
        bundle = shared.settings.bundle
        limit = whose_tokens(ended.reason, bundle, beside_an_engine=shared.has_engine_behind)
        if not limit:
            return ended
        if ended.reason == "context":
            self._full.warn("full", f"an answer was cut: {limit}", peer, "cut")
        return replace(ended, why="; ".join(filter(None, (ended.why, limit))))

    @contextlib.asynccontextmanager
    async def _conversation(
        self, principal: str, ids: Sequence[int]
    ) -> AsyncGenerator[Conversation, None]:
        """Lend the principal's conversation that this prompt goes on with, or else a new one. It
        rests afterwards, for the next question, also where its answer was stopped."""
        conversation = self._going_on_with(principal, ids) or self._client.conversation()
        try:
            yield conversation
        except Exception:
            await conversation.aclose()
            raise
        finally:
            if not conversation.closed:
                self._resting.append((principal, conversation))
                await self._end_oldest()

    async def _end_oldest(self) -> None:
        """End the conversations that have rested longest, and give back what they held."""
        if len(self._resting) <= _MOST_RESTING:
            return
        while len(self._resting) > _MOST_RESTING:
            await self._resting.pop(0)[1].aclose()
        await asyncio.to_thread(self._client.device.give_back)

    def _going_on_with(self, principal: str, ids: Sequence[int]) -> Conversation | None:
        """Take the principal's resting conversation that has most of the prompt's beginning, if one
        has enough of it to be worth that."""
        self._resting = [one for one in self._resting if not one[1].closed]
        prompt = list(ids)
        found = None
        longest = _LEAST_COMMON - 1
        for one in self._resting:
            owner, conversation = one
            common = common_prefix(conversation.ids, prompt)
            if owner == principal and common > longest:
                longest = common
                found = one
        if found is None:
            return None
        self._resting.remove(found)
        return found[1]

    def _written(self, ask: AnswerRequest, encoded: Encoded) -> list[int]:
        """Returns the tokens of an answer that is only to be checked; none for another request."""
        if not ask.was_written:
            return []
        end_tokens = sorted(self._client.device.codec.eos_ids)[:1] if ask.was_ended else []
        return [*encoded.prediction, *end_tokens]

    def _check_features(self, ask: AnswerRequest, encoded: Encoded) -> None:
        """Refuse a request for what the verifier cannot do, as far as that is known by now."""
        welcome = self._client.shared.welcome
        self._check_adjustments(ask, welcome)
        if welcome is None:
            return  # no verifier has been reached yet
        if not encoded.messages and self._client.shared.takes_chats_alone:
            raise bad(
                f"{self._verifier} takes chats only, and a text that is none would be this device's"
                " own: ask /v1/chat/completions",
                "prompt",
                "unsupported_parameter",
            )
        if ask.logprobs is not None and "logprobs" not in welcome.features:
            raise bad(
                f"{self._verifier} tells no log-probabilities", "logprobs", "unsupported_parameter"
            )
        if encoded.grammar is not None and "grammar" not in welcome.features:
            raise bad(
                f"{self._verifier} cannot follow a grammar",
                "response_format",
                "unsupported_parameter",
            )

    def _check_adjustments(self, ask: AnswerRequest, welcome: Welcome | None) -> None:
        """Refuse penalties and biases by name where the verifier, or the engine behind it, would
        not write by them: all of the answer would be this device's own. With an upstream that is
        known before anything has answered."""
        settings = self._client.settings
        if welcome is None and not settings.upstream:
            return
        if welcome is not None and "penalties" in welcome.features:
            return
        has_engine_behind = welcome is None or "behind" in welcome.features
        for name in ADJUSTMENTS:
            asked = getattr(ask, name)
            if not (getattr(settings, name) if asked is None else asked):
                continue
            why = not_passed_on(name) if has_engine_behind else f"the verifier knows no {name}"
            raise bad(why, name, "unsupported_parameter")

    def _patience(self, ask: AnswerRequest, prompt_tokens: int, now: float) -> Patience:
        """Returns how long this request waits for its first event, and for each further one."""
        usual = self._client.shared.controller.answer_seconds(prompt_tokens)
        return Patience(
            ask.mode,
            seconds=ask.patience,
            first=usual + max(ask.patience, _FIRST_SECONDS),
            now=now,
        )

    def _longest(self, ask: AnswerRequest) -> int:
        """The most tokens that the answer may have: what the verifier allows, or what verifiers
        usually do."""
        most = self._client.shared.longest_answer(0)
        return answer_limit(ask, self._client.settings.max_new_tokens, most)

    def status(self) -> dict[str, Any]:
        """Returns the model's limits and the state of the link, as far as they are known, for the
        page."""
        link = self._client.link
        welcome = self._client.shared.welcome
        settings = self._client.settings
        remark = toy_of(self._client)
        about = {
            # The embedded models on both ends: the page says what they can do
            "demo": not settings.bundle and not settings.upstream,
            "toy": [remark] if remark else [],
            # A verifier may have less than the model
            "context": self._client.shared.max_context if link is None or welcome else None,
            "max_tokens": self._client.shared.longest_answer(self._client.settings.max_new_tokens),
        }
        if link is None:
            return {"link": "none", **about}
        state, why = state_of(link, perf_counter())
        is_heard = state in ("online", "limited")
        is_measured = is_heard and link.rtt.samples and not link.endpoint.upstream
        rtt_ms = round(1000 * link.rtt.smoothed, 2) if is_measured else None
        return {
            "link": state,
            "cut": link.dialling.cut,
            "detail": why,
            "verifier": link.endpoint.name,
            "upstream": bool(link.endpoint.upstream),
            "verifier_version": welcome.server if welcome else None,
            "rtt_ms": rtt_ms,
            "sent_bytes": link.sent_bytes,
            "received_bytes": link.received_bytes,
            **about,
        }

    def cut_off(self, *, cut: bool) -> None:
        """Disconnect the verifier on purpose, or reconnect."""
        if self._client.link is None:
            raise UsageError(
                "there is no verifier to cut off", hint="start with --verifier or --upstream"
            )
        self._client.link.cut_off(cut=cut)

    def not_ready(self) -> str:
        """A device can always answer."""
        return ""

    async def unverified(self) -> str:
        """Why its text would not be verified now: the verifier, or the engine behind it, is not
        reached. Empty if it would, and for a device that is to be alone. An engine that was not
        heard lately is looked at first."""
        link = self._client.link
        if link is None:
            return ""
        state, why = state_of(link, perf_counter())
        if state in ("online", "limited"):  # a rate is used up for a moment
            return await why_unready(link)
        return why or state


def changes_of(ask: AnswerRequest, longest: int) -> TurnChanges:
    """The client settings that a request changes for its turn."""
    given = {name: getattr(ask, name) for name in _ASKED}
    given |= {"max_new_tokens": longest, "settle_seconds": ask.patience}
    given["on_reconnect"] = "keep" if ask.mode == "keep" else "rewind"
    return cast(TurnChanges, {name: value for name, value in given.items() if value is not None})


class Marks:
    """Where each token of the answer ends in its text, and what the target's likeliest tokens read
    there."""

    def __init__(
        self,
        codec: Decoder,
        eos_ids: Collection[int],
        *,
        who_verifies: str = "the verifier",
        max_offline_tokens: int = -1,
    ) -> None:
        """`max_offline_tokens` is the user's limit of unverified tokens; -1: the device has its
        own."""
        self._codec = codec
        self._who_verifies = who_verifies
        self._stopped = _STOPPED
        if max_offline_tokens >= 0:
            self._stopped = _STOPPED_BY_LIMIT.format(max_offline_tokens)
        self.trouble = ""
        """Why nothing is verified now, as the link's latest trouble has it."""
        self._why_alone = ""
        """Why text is the device's own, as the trouble has it under which it was written."""
        self._has_own = False
        """Whether text stands that the device wrote and the target has not verified."""
        self._has_adopted = False
        """Whether some of it stays so."""
        self.refused = False
        """Whether that is a refusal, which to wait does not mend."""
        self._eos_ids = eos_ids
        self._start = 0
        """Tokens of the prompt."""
        self._ends: list[int] = []
        """Where each token of the answer ends, in characters."""
        self._ids: list[int] = []
        """The prompt's last token, then the answer's."""

    def take(self, event: Event) -> AnswerEvent | None:
        """Returns the event as clients of the API get it, with positions in characters instead of
        tokens; None if it says nothing to a client."""
        match event:
            case Prompt(ids=ids):
                self._start = len(ids)
                self._ids = ids[-1:]
                return Began()
            case Token(text=text, status=status, logprobs=told):
                self._ends.append(self._end(len(self._ends)) + len(text))
                self._ids.append(event.id)
                self._has_own |= status == "provisional"
                return Piece(
                    text,
                    status == "verified",
                    self._scored(event.position, (told,) if told else ()),
                )
            case Confirm(start=start, stop=stop, logprobs=told):
                if stop - self._start >= len(self._ends):
                    self._has_own = self._has_adopted
                return Verified(self._end(stop - self._start), self._scored(start, told))
            case Adopt(stop=stop):
                self._has_adopted = True
                return Verified(self._end(stop - self._start))
            case Retract(start=start, characters=characters):
                kept = start - self._start
                del self._ends[kept:]
                del self._ids[kept + 1 :]
                self._has_own = self._has_adopted
                return Cut(characters)
            case Link(state=state, detail=detail, for_now=for_now):
                if state in _TROUBLE:
                    self.trouble = detail or _TROUBLE[state].format(self._who_verifies)
                    self.refused = state == "refused" and not for_now
                    # A verifier that comes back in mid-answer is "late" until it has read what it
                    # missed: that is not why the text before is the device's own.
                    is_at_work = state == "late" and not detail
                    if not (is_at_work and self._has_own):
                        self._why_alone = self.trouble
                return LinkNews(state, detail)
            case Progress(done=done, total=total, by=by):
                return Reading(done, total, by)
            case Notice(message=message):
                return Note(message)
            case Done():
                return self._ended(event)
        return None

    def _scored(self, start: int, told: Iterable[TokenLogprobs]) -> tuple[Scored, ...]:
        """Returns the log-probabilities of the tokens from position `start` on. Tokens that end the
        answer are left out, because they are no text."""
        entries = []
        for place, one in enumerate(told, start - self._start):
            # The prompt's last token comes first in this list, so each token is one place further.
            before = self._ids[place : place + 1]
            token = self._ids[place + 1]
            if token not in self._eos_ids:
                entries.append(scored(one, token, partial(text_after, self._codec, before)))
        return tuple(entries)

    def _end(self, tokens: int) -> int:
        """Where the first so many tokens of the answer end, in characters."""
        return self._ends[tokens - 1] if tokens else 0

    def _ended(self, done: Done) -> Ended:
        """Returns the end of the answer, with its figures for the API."""
        stats = done.stats
        usage = {"prompt_tokens": self._start, "completion_tokens": stats["tokens"]}
        if done.verified:  # else a part of the answer is in no count of the upstream's
            usage = stats.get("upstream_usage", usage)
        counts = Counts(
            prompt_tokens=usage["prompt_tokens"],
            tokens=usage["completion_tokens"],
            drafted=stats["drafted"],
            accepted=stats["accepted"],
            calls=stats["calls"],
            forwards=stats["forwards"],
            forward_tokens=sum(stats["streamed_by"].values()),
            unverified=stats["unverified_tokens"],
            more={name: stats[name] for name in _FIGURES if name in stats},
        )
        return Ended(
            reason=done.reason,
            verified=done.verified,
            text=done.text,
            counts=counts,
            why="" if done.verified else self._why(done.reason),
            refused=self.refused and not done.verified,
        )

    def _why(self, reason: Reason) -> str:
        """Why an answer is not verified, and that this device has cut it if it has."""
        return "; ".join(
            filter(None, (self._why_alone, self._stopped if reason == "guard" else ""))
        )
