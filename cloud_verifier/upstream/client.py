"""Asks upstreams over HTTP: one after another where one fails, with a pause for each that did."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2 as httpx
import msgspec

from cloud_verifier.logs import log
from cloud_verifier.upstream.call_style import CallStyle
from cloud_verifier.upstream.chats import most_tokens
from cloud_verifier.upstream.contract import (
    Candidates,
    Continuation,
    Dialect,
    Ending,
    NoRouteError,
    NotScoredError,
    Piece,
    RefusedError,
    TooLongError,
    UpstreamError,
    UpstreamFacts,
    Usage,
)
from cloud_verifier.upstream.dialects import dialect
from cloud_verifier.upstream.failures import no_answer, speaks_no_tls
from cloud_verifier.upstream.figures import Figures, Request
from cloud_verifier.upstream.joining import ContradictedError, Way
from cloud_verifier.upstream.json_style import JsonStyle
from cloud_verifier.upstream.lines import bounded_lines, error_text, openai_usage
from cloud_verifier.upstream.tokens import Encode
from moa.api.tools import offered_calls
from moa.safe_text import safe_line
from moa.upstream_address import upstream_address

_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 60.0
"""Without a byte in mid-answer, after which it has broken off."""
_SILENT_TIMES = 2.0
"""Or for so many times as long as its first text took, if that is more: an engine that reads another
prompt meanwhile is as slow with it."""
_READING_SECONDS = 600.0
"""Without a byte before the answer, at most: a slow engine reads a long prompt without one. To ask
again would have it read anew."""
_PROBE = httpx.Timeout(10.0, connect=_CONNECT_SECONDS)
_ROUTE_SECONDS = 2.0
"""Whether it has a route is not waited for longer: its first answer says so, too."""
_ROUTES = ("completions", "chat/completions")
"""OpenAI's, of which many services have one."""
_LOOK_SECONDS = 5.0
"""An upstream that does not tell its models within so long counts as away, until it answers."""
_MOST_BODY = 2**20
"""Bytes of an answer that is no stream: a list of models, an error."""
_USAGE_SECONDS = 1.0
"""For so long an answer that has ended waits for its usage."""
_REST_SECONDS = 0.05
"""For so long it waits behind that for the end of the body, which engines send at once."""
_MOST_CANDIDATE_BYTES = 256
"""Of JSON that tells of one candidate: id, number, rank and text."""
_TOKENIZED = "def size(of):  # Größe in µm\n    return 1234567 * of['x']  # 大小 🙂 don't\n"
"""A text whose tokens are hardly the same in two tokenizers."""
_MOST_WITHOUT_SCORES = 3
"""Answers in a row without the scores that were asked for, after which an upstream is not asked for
scores any more. One may be a login page of the network."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
"""Seconds before an upstream that failed is asked again: doubled each time."""
_LOOK_PAUSE = 1.0
"""Seconds between two looks at upstreams that have failed, while somebody asks for an answer."""
_LONGEST_ASKED_PAUSE = 300.0
"""Seconds of a `retry-after` that are believed."""
_DOUBTED_SECONDS = 10.0
"""For so long at least after a request was answered with an error the list of models proves nothing:
many services have it while they answer nothing else."""


@dataclass
class Upstream:
    """One address of an engine, and how it has done lately."""

    url: str
    """Below which OpenAI's routes lie, such as http://gpu:8000/v1."""
    key: str = ""
    facts: UpstreamFacts | None = None
    same_tokens: bool | None = None
    """Whether its tokenizer is the device's; None: it does not say."""
    refuses: set[Way] = field(default_factory=set)
    """Ways to ask that it has refused."""
    lacks: set[str] = field(default_factory=set)
    """Fields that it has refused."""
    refuses_scores: bool = False
    """Whether it has refused to score tokens, or has answered with no scores again and again."""
    without_scores: int = 0
    """Answers in a row to a request for scores that held none."""
    pause: float = 0.0
    """Seconds of the latest pause after a failure; the next one is twice as long."""
    not_before: float = 0.0
    """When it may be asked again."""
    tells_endings: bool = False
    """Whether it has said why an answer ended: a stream of its that does not say so was cut."""
    lacks_chats: bool = False
    """Whether it has completions alone, as far as was seen."""
    refuses_all: bool = False
    """Whether its latest answer to a request was a refusal that any other would get, too."""
    away: str = "it was not asked yet"
    """Why it does not answer, as far as is known; empty if it does."""
    heard_at: float = float("-inf")
    """When it last answered."""
    doubted_until: float = float("-inf")
    """Until when its list of models does not prove that it answers."""
    look_seconds: float = 0.0
    """How long it took to tell its models lately: more on a machine that is busy with a prompt."""

    def failed(self, now: float, error: UpstreamError) -> None:
        """Note a failure: it is not asked again for a pause, or for the seconds that it asked for
        itself, if these are more."""
        self.pause = min(max(2 * self.pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        self.not_before = now + max(self.pause, min(error.retry_after, _LONGEST_ASKED_PAUSE))
        if error.reached:
            self.doubted_until = max(now + _DOUBTED_SECONDS, self.not_before)
        self.away = error.line()

    def worked(self, now: float) -> None:
        """Note that it has answered: it may be asked at any time."""
        self.pause = 0.0
        self.not_before = 0.0
        self.heard_at = now
        self.away = ""
        self.refuses_all = False


class Abilities(NamedTuple):
    """What every one of some upstreams can do, as far as they are known."""

    scores: bool = False
    """Whether the device's drafts can be checked there."""
    candidates: int = 0
    """Likeliest tokens that they tell for a place."""


class Upstreams:
    """Upstreams that serve the same model."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        model: str = "",
        interface: str = "auto",
        key: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the upstreams at these addresses, which serve the same model; `model` names it,
        empty for their only one, and `interface` says how they are asked. Nothing is sent yet."""
        self._all = [Upstream(upstream_address(address), key) for address in addresses]
        self._model = model
        self._interface = interface
        self._clock = clock
        self.encode: Encode | None = None
        """The device's tokenizer, for engines that take tokens: theirs must be the same."""
        self.learned: Callable[[], None] = lambda: None
        """Called when more is known of what they can do."""
        self.figures = Figures()
        """What is counted of them."""
        self.changed: Callable[[], None] = lambda: None
        """Called when one of them begins or ceases to answer."""
        if interface != "auto":
            dialect(interface)  # a wrong name is said now
        self._next_look = float("-inf")
        """When somebody who asks may have failed upstreams looked at again."""
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(_READING_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            follow_redirects=False,  # a portal redirects; keys go nowhere else
            transport=transport,
        )

    @property
    def takes_messages(self) -> bool:
        """Whether an upstream may take conversations: where it is not known yet, too."""
        return self._interface == "auto" or dialect(self._interface).takes == "chat"

    @property
    def takes_chats_alone(self) -> bool:
        """Whether it is known that none of them continues a text that is no conversation."""
        known = self._interface != "auto" or all(one.facts is not None for one in self._all)
        return known and all(self._dialect(one).takes == "chat" for one in self._all)

    @property
    def abilities(self) -> Abilities:
        """What all upstreams can do beside writing; nothing while one of them has not said what it
        is."""
        dialects = [self._dialect(upstream) for upstream in self._all]
        if self._interface == "auto" and any(upstream.facts is None for upstream in self._all):
            return Abilities()
        can_score = all(how.scores for how in dialects)
        refused = any(upstream.refuses_scores for upstream in self._all)
        return Abilities(
            scores=can_score and not refused,
            candidates=min(how.most_candidates for how in dialects),
        )

    @property
    def spoken(self) -> str:
        """How they are asked, as `--upstream-api` names it, as far as that is known; `auto` while
        none of those that are to be found out has said what it is."""
        known = [
            self._dialect(upstream).name
            for upstream in self._all
            if upstream.facts is not None or self._interface != "auto"
        ]
        return ", ".join(dict.fromkeys(known)) or self._interface

    @property
    def addresses(self) -> list[str]:
        """Where they are."""
        return [upstream.url for upstream in self._all]

    @property
    def model(self) -> str:
        """The model's name, as the settings have it or the first that has answered says it; empty
        while nobody has."""
        for upstream in self._all:
            if upstream.facts is not None:
                return upstream.facts.model
        return self._model

    @property
    def away(self) -> str:
        """Why none of them answers, as far as is known; empty if one does."""
        if any(not upstream.away for upstream in self._all):
            return ""
        return self._all[-1].away

    @property
    def look_seconds(self) -> float:
        """Seconds in which the slowest of them told its models lately."""
        return max(upstream.look_seconds for upstream in self._all)

    def silent_for(self, now: float) -> float:
        """Seconds since one of them last answered."""
        return now - max(upstream.heard_at for upstream in self._all)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def probe(self) -> UpstreamFacts:
        """Ask one upstream after another for its model, and return what the first that answers
        says. If none does, the last one's error is raised."""
        last_error = UpstreamError("no upstream is given", later=False)
        for upstream in self._all:
            try:
                facts = await self._facts(upstream)
            except UpstreamError as error:
                last_error = error
                upstream.away = error.line()
            else:
                self._worked(upstream)
                return facts
        self.changed()
        raise last_error

    async def look(self) -> None:
        """Ask every upstream for its list of models, to know whether it answers."""
        await asyncio.gather(*map(self._look_at, self._all))

    async def _look_in_vain(self) -> None:
        """Look whether one of the upstreams, all of which have failed lately, is back before its
        pause is over: somebody asks. Once a second at most, however many ask."""
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + _LOOK_PAUSE
            await asyncio.gather(
                *(self._look_at(one) for one in self._all if now >= one.doubted_until)
            )

    async def _look_at(self, upstream: Upstream) -> bool:
        """Ask one upstream for its list of models, and note whether it answers. Returns whether it
        lives: it has told its models, or answered a request meanwhile."""
        began = self._clock()
        trouble = ""
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                if upstream.facts is None:
                    await self._facts(upstream)
                else:
                    _chosen(await self._models(upstream), upstream.facts.model)
        except TimeoutError:
            trouble = "the upstream is silent"
        except UpstreamError as error:
            trouble = error.line()
        if trouble:
            if upstream.heard_at >= began:  # a request was answered meanwhile
                return True
            upstream.away = trouble
            self._note(upstream)
            return False
        upstream.look_seconds = self._clock() - began
        if self._clock() >= upstream.doubted_until and not upstream.refuses_all:
            upstream.worked(self._clock())
            self._note(upstream)
        return True

    def _worked(self, upstream: Upstream) -> None:
        """Note that an upstream has answered."""
        was_away = bool(upstream.away)
        upstream.worked(self._clock())
        if was_away:
            self._note(upstream)

    def _note(self, upstream: Upstream) -> None:
        """Tell whoever wants to know that an upstream may have begun or ceased to answer."""
        self.figures.answers.labels(upstream.url).set(not upstream.away)
        self.changed()

    async def go_on(self, asked: Continuation) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the text or tokens that follow the prompt, and signs of work before
        them. If an upstream fails before its first text, the next one is asked. After it the error
        is raised, for another upstream would write another text."""
        if self._wait():
            await self._look_in_vain()
        last_error = UpstreamError(self.away)
        passed_over: list[Upstream] = []
        for upstream in self._all:
            if upstream.not_before > self._clock():
                passed_over.append(upstream)
                continue  # it has failed lately
            for other in passed_over:
                self.figures.failovers.labels(other.url).inc()
            passed_over = []
            has_begun = False
            try:
                async with self._answer(upstream, asked) as (request, pieces):
                    async for piece in pieces:
                        has_begun = has_begun or piece.is_answer
                        self._worked(upstream)
                        request.took(piece, self._clock())
                        yield piece
                    if not has_begun:
                        request.failed(later=True)
                return
            except UpstreamError as error:
                last_error = error
                if error.later:
                    self._note_failure(upstream, error)
                elif error.always:
                    self._note_useless(upstream, error)
                if has_begun or not error.later:
                    raise
                passed_over.append(upstream)
        raise UpstreamError(str(last_error), retry_after=self._wait(), hint=last_error.hint)

    @contextlib.asynccontextmanager
    async def _answer(
        self, upstream: Upstream, asked: Continuation
    ) -> AsyncIterator[tuple[Request, AsyncGenerator[Piece, None]]]:
        """Ask an upstream; a context with its answer, and with the request, which is counted in the
        figures at the end."""
        request = self.figures.request(upstream.url, asked, self._clock())
        try:
            async with contextlib.aclosing(self._heard(upstream, asked)) as pieces:
                yield request, pieces
        except UpstreamError as error:
            request.failed(later=error.later)
            raise
        finally:
            request.end(self.encode)

    def _note_failure(self, upstream: Upstream, error: UpstreamError) -> None:
        """Ask an upstream that has failed for nothing until a pause is over."""
        upstream.failed(self._clock(), error)
        self._note(upstream)
        log.warning(
            "the upstream failed: %s",
            safe_line(error.line()),
            extra={"event": "upstream", "url": upstream.url},
        )

    def _note_useless(self, upstream: Upstream, error: UpstreamError) -> None:
        """Note that an upstream refuses whatever it is asked: that it tells its models proves
        nothing, until a request is answered."""
        upstream.refuses_all = True
        upstream.away = error.line()
        self._note(upstream)

    async def _heard(self, upstream: Upstream, asked: Continuation) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of an upstream's answer; an error if it is silent. One that has not begun
        to answer may be reading the prompt: it is waited for as long as it tells its models."""
        asked_at = self._clock()
        async with contextlib.aclosing(self._ask(upstream, asked)) as pieces:
            piece = await self._before_answer(upstream, pieces)
            while piece is not None and not piece.is_answer:
                yield piece
                piece = await self._before_answer(upstream, pieces)
            longest = max(_SILENT_SECONDS, _SILENT_TIMES * (self._clock() - asked_at))
            while piece is not None:
                yield piece
                try:
                    async with asyncio.timeout(longest):
                        piece = await anext(pieces, None)
                except TimeoutError:
                    raise _silent() from None

    async def _before_answer(
        self, upstream: Upstream, pieces: AsyncGenerator[Piece, None]
    ) -> Piece | None:
        """Wait for the next piece of an answer that has not begun, while the upstream tells its
        models."""
        coming = asyncio.ensure_future(anext(pieces, None))
        try:
            while not (await asyncio.wait({coming}, timeout=_SILENT_SECONDS))[0]:
                lives = await self._look_at(upstream)
                # A machine that is busy with the prompt may be too slow for one of many looks.
                silence = self._clock() - upstream.heard_at
                if not lives and not coming.done() and silence >= _SILENT_SECONDS:
                    raise _silent()
            return coming.result()
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    def _wait(self) -> float:
        """Seconds until the first of the upstreams may be asked again."""
        earliest = min(upstream.not_before for upstream in self._all)
        return max(0.0, earliest - self._clock())

    async def _facts(self, upstream: Upstream) -> UpstreamFacts:
        """What an upstream says of itself: it is asked once."""
        if upstream.facts is None:
            listed = await self._models(upstream)
            facts = _chosen(listed, self._model)
            upstream.same_tokens = await self._has_same_tokens(upstream, facts)
            await self._find_route(upstream, facts)
            upstream.facts = facts
            self.learned()
        return upstream.facts

    async def _find_route(self, upstream: Upstream, facts: UpstreamFacts) -> None:
        """Learn whether an upstream has the route that it would be asked at; an error if it has
        not. With `auto` one that has no chats is asked for completions."""
        how = self._how(upstream, facts)
        if not await self._lacks_route(upstream, how, facts.model):
            return
        if not self._is_guessed(how):
            raise _no_route(upstream, how)
        completions = dialect("completions")
        if await self._lacks_route(upstream, completions, facts.model):
            raise NoRouteError(
                "the upstream has neither /chat/completions nor /completions",
                hint=f"is {upstream.url} its address?",
            )
        self._note_no_chats(upstream)

    def _is_guessed(self, how: Dialect) -> bool:
        """Whether nothing has said that an upstream is to be asked so."""
        return self._interface == "auto" and how.name == "chat"

    def _note_no_chats(self, upstream: Upstream) -> None:
        """Ask an upstream for completions from now on."""
        upstream.lacks_chats = True
        self.learned()
        log.info(
            "the upstream has no chats: it is asked for completions",
            extra={"event": "upstream", "url": upstream.url},
        )

    async def _lacks_route(self, upstream: Upstream, how: Dialect, model: str) -> bool:
        """Whether an upstream says that it has no such route of OpenAI's. It is asked with a request
        without a prompt, for which nothing is written. One that says nothing clear may have it. An
        error where the key is refused: some tell their models without one."""
        if how.path() not in _ROUTES or how.takes == "tokens":
            return False
        try:
            async with self._http.stream(
                "POST",
                f"{upstream.url}/{how.path()}",
                headers=how.headers(upstream.key),
                json={"model": model},
                timeout=_ROUTE_SECONDS,
            ) as response:
                if response.status_code == httpx.codes.OK:
                    return False
                _check(response, await _whole(response), upstream, how)
        except NoRouteError:
            return True
        except UpstreamError as error:
            if error.always:
                raise
        except httpx.HTTPError:
            pass
        return False

    def _dialect(self, upstream: Upstream) -> Dialect:
        """Returns how an upstream is asked: as the settings say, or by what its list of models
        says, once that was read. An engine that takes token ids is asked by chats unless its tokens
        are known to be the device's: with others it would write nonsense."""
        return self._how(upstream, upstream.facts)

    def _how(self, upstream: Upstream, facts: UpstreamFacts | None) -> Dialect:
        """Returns how an upstream is asked that says this of itself."""
        owner = facts.owner if facts is not None else ""
        host = urlsplit(upstream.url).hostname or ""
        same_tokens = self.encode is None or upstream.same_tokens is True
        how = dialect(self._interface, owner, host, same_tokens=same_tokens)
        if upstream.lacks_chats and self._is_guessed(how):
            return dialect("completions")
        return how

    async def _has_same_tokens(self, upstream: Upstream, facts: UpstreamFacts) -> bool | None:
        """Whether the upstream's tokenizer is the device's: it is asked for the tokens of one
        difficult text. None if it does not say, or takes no token ids."""
        host = urlsplit(upstream.url).hostname or ""
        how = dialect(self._interface, facts.owner, host)
        if how.takes != "tokens" or self.encode is None:
            return None
        answer = await self._tokenized(upstream, how, facts.model)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            return None
        return bool(tokens == list(self.encode(_TOKENIZED)))

    async def _tokenized(self, upstream: Upstream, how: Dialect, model: str) -> Any:
        """Ask an upstream for the tokens of the difficult text; returns its answer as JSON, None if
        it refuses."""
        try:
            async with self._http.stream(
                "POST",
                httpx.URL(f"{upstream.url}/").join("../tokenize"),
                headers=how.headers(upstream.key),
                json=how.tokenize_body(_TOKENIZED, model),
                timeout=_PROBE,
            ) as response:
                body = await _whole(response)
                if response.status_code != httpx.codes.OK:
                    return None
        except httpx.HTTPError as error:
            raise _unreachable(error, upstream) from None
        return _decoded(body)

    async def _models(self, upstream: Upstream) -> list[dict[str, Any]]:
        """Returns an upstream's list of models. One that has no such list is believed to have the
        model that the settings name."""
        try:
            async with self._http.stream(
                "GET",
                f"{upstream.url}/models",
                headers=self._dialect(upstream).headers(upstream.key),
                timeout=_PROBE,
            ) as response:
                body = await _whole(response)
                if response.status_code in (404, 405) and self._model:
                    return [{"id": self._model}]
                _check(response, body, upstream)
        except httpx.HTTPError as error:
            raise _unreachable(error, upstream) from None
        found = _decoded(body)
        models = found.get("data") if isinstance(found, dict) else None
        if not isinstance(models, list):
            raise UpstreamError("the upstream's list of models is none")
        return [model for model in models if isinstance(model, dict)]

    async def _ask(self, upstream: Upstream, asked: Continuation) -> AsyncGenerator[Piece, None]:
        """Ask one upstream in one way after another, until an answer continues the text that is
        there, and yield its pieces. Ways that it has refused before are left out."""
        model = (await self._facts(upstream)).model
        how = self._dialect(upstream)
        _check_tokenizer(upstream, how)
        if asked.draft:  # it is to judge tokens, and not to write any
            yield await self._score(upstream, how, asked, model)
            return
        ways = [way for way in how.ways(asked) if way not in upstream.refuses]
        for way in ways:
            attempt = self._once(upstream, how, dataclasses.replace(asked, way=way), model)
            try:
                async with contextlib.aclosing(attempt) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except ContradictedError:
                self.figures.retries.labels(upstream.url).inc()
                log.info("another answer than before", extra={"event": "upstream", "way": way})
            except RefusedError as error:
                # Many services refuse a last message of the assistant's; that is no reason to give
                # up. A refusal of another way is about the request itself.
                if way != "behind" or way == ways[-1]:
                    raise
                self.figures.retries.labels(upstream.url).inc()
                _note_refused_way(upstream, way, error)
            except NoRouteError:
                if not self._is_guessed(how):
                    raise
                self.figures.retries.labels(upstream.url).inc()
                self._note_no_chats(upstream)
                async for piece in self._ask(upstream, asked):
                    yield piece
                return
        raise UpstreamError("the upstream does not go on with its own answer", later=False)

    async def _score(
        self, upstream: Upstream, how: Dialect, asked: Continuation, model: str
    ) -> Piece:
        """Returns what the upstream thinks of a draft: for the place of each drafted token the
        likeliest tokens with their log-probabilities. If it cannot tell, it is not asked again: it
        writes alone."""
        url = httpx.URL(f"{upstream.url}/").join(how.path())
        # An answer tells candidates for every token of the prompt at most.
        places = len(asked.ids) + len(asked.draft) + 1
        most = _MOST_BODY + _MOST_CANDIDATE_BYTES * (asked.candidates + 1) * places
        try:
            body = how.score_body(asked, model)
            async with self._http.stream(
                "POST", url, headers=how.headers(upstream.key), json=body
            ) as response:
                answer = await _whole(response, most)
                _check(response, answer, upstream, how)
            decoded, candidates = _scores(upstream, how, asked, answer)
            return Piece(
                candidates=candidates,
                usage=openai_usage(decoded) if isinstance(decoded, dict) else None,
            )
        except httpx.HTTPError as error:
            raise _unreachable(error, upstream) from None
        except (RefusedError, NotScoredError) as error:
            self._note_no_scores(upstream, error)
            raise NotScoredError(error.line()) from None

    def _note_no_scores(self, upstream: Upstream, error: UpstreamError) -> None:
        """Ask an upstream for no more scores, because of this answer: it writes alone."""
        upstream.refuses_scores = True
        log.warning(
            "the upstream does not check drafts: it writes alone (%s)",
            safe_line(error.line()),
            extra={"event": "upstream", "url": upstream.url},
        )
        self.learned()

    async def _once(
        self, upstream: Upstream, how: Dialect, asked: Continuation, model: str
    ) -> AsyncGenerator[Piece, None]:
        """Send one request, and yield the pieces of its answer. A field that the service refuses is
        noted, and the request is sent again without it, at most once for each such field."""
        url = httpx.URL(f"{upstream.url}/").join(how.path())
        for _ in range(len(how.optional) + 1):
            body = how.body(asked, model)
            _leave_out(body, upstream.lacks, how.optional)
            try:
                async with self._http.stream(
                    "POST", url, headers=how.headers(upstream.key), json=body
                ) as response:
                    if response.status_code != httpx.codes.OK:
                        _check(response, await _whole(response), upstream, how)
                    async for piece in _pieces(response, upstream, how, asked):
                        yield piece
                    return
            except httpx.HTTPError as error:
                raise _unreachable(error, upstream) from None
            except RefusedError as error:
                refused = _named(str(error), how.optional.keys() & body.keys())
                if refused is None:
                    raise
                self.figures.retries.labels(upstream.url).inc()
                _note_lacking(upstream, refused)


def _check_tokenizer(upstream: Upstream, how: Dialect) -> None:
    """An error for an upstream that takes token ids and has another tokenizer than the device."""
    if how.takes == "tokens" and upstream.same_tokens is False:
        raise UpstreamError(
            "the upstream's tokenizer is not the one of the device's bundle",
            later=False,
            hint="--upstream-api chat, or the bundle of a small model of the same family",
        )


def _note_refused_way(upstream: Upstream, way: Way, error: RefusedError) -> None:
    """Ask an upstream no more in this way, which it has refused."""
    upstream.refuses.add(way)
    log.warning(
        "the upstream does not go on with an answer: it is asked anew (%s)",
        safe_line(error.line()),
        extra={"event": "upstream", "url": upstream.url},
    )


def _note_lacking(upstream: Upstream, field: str) -> None:
    """Send an upstream this field no more, which it has refused."""
    upstream.lacks.add(field)
    log.warning(
        "the upstream takes no %s: its text is by its own default or chance",
        field,
        extra={"event": "upstream", "url": upstream.url},
    )


def _leave_out(body: dict[str, object], lacks: set[str], optional: Mapping[str, str]) -> None:
    """Take the fields that a service lacks out of a request's body, or send them by the other names
    that `optional` has for them."""
    for name, other_name in optional.items():
        if name in lacks and name in body:
            value = body.pop(name)
            if other_name:
                body[other_name] = value


async def _pieces(
    response: httpx.Response, upstream: Upstream, how: Dialect, asked: Continuation
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of a streamed answer, with only what is new in their text. An error where
    there was something new, and then no end."""
    content_type = response.headers.get("content-type", "")
    if not content_type.startswith(("text/event-stream", "application/x-ndjson")):
        raise UpstreamError(f"the upstream answers with {safe_line(content_type)!r}, no stream")
    new_text = _NewText(how, asked)
    tokens_left = asked.most
    lines = bounded_lines(response.aiter_bytes())
    has_text = has_new = False
    usage_so_far: Usage | None = None
    pieces = how.pieces(lines)
    async for piece in pieces:
        usage_so_far = piece.usage or usage_so_far
        if piece.ending == "done":
            if upstream.tells_endings or not has_text:
                break
            piece = dataclasses.replace(piece, ending=_untold_ending(asked, usage_so_far))
        elif piece.ending:
            upstream.tells_endings = True
        has_text = has_text or bool(piece.text or piece.ids)
        tokens_left -= len(piece.ids)
        text = new_text.add(piece.text)
        has_new = has_new or bool(text or piece.ids)
        usage = piece.usage
        if piece.ending:
            text += new_text.rest()
            if usage is None:
                yield Piece(is_complete=True)
            usage = await _rest(pieces, lines, usage)
        if text != piece.text or usage is not piece.usage:
            piece = dataclasses.replace(piece, text=text, usage=usage)
        yield piece
        if piece.ending or tokens_left < 0:
            return  # a service that writes more than it was asked for is cut off
    if has_new:
        raise UpstreamError("the upstream ended its answer without saying why", reached=False)


def _untold_ending(asked: Continuation, usage: Usage | None) -> Ending:
    """Returns why an answer has ended whose stream is complete, `[DONE]`, and has no
    `finish_reason`: OpenAI's own client takes it for whole. The upstream's count may show that it
    was long enough."""
    is_full = usage is not None and usage.written >= most_tokens(asked)
    return "length" if is_full else "eos"


class _NewText:
    """Finds what is new in the text of an answer, piece by piece: what it repeats of the text that
    is there is left out. JSON and calls of tools are brought into the style of our grammars first,
    in which the text that is there is written."""

    def __init__(self, how: Dialect, asked: Continuation) -> None:
        self._join = how.join(asked)
        self._style: JsonStyle | CallStyle | None = None
        if asked.grammar is None:
            return
        begun = "" if asked.way == "anew" else asked.begun
        if asked.grammar.kind == "json_schema":
            self._style = JsonStyle(begun)
        elif not begun:
            offered = offered_calls(asked.grammar)
            self._style = None if offered is None else CallStyle(offered)

    def add(self, text: str) -> str:
        """Take in a piece of the answer, and return what is certainly new in it."""
        if self._style is not None:
            text = self._style.add(text)
        return self._join.add(text) if text else ""

    def rest(self) -> str:
        """Return what was kept back: the answer has ended."""
        styled = self._style.rest() if self._style is not None else ""
        new = self._join.add(styled) if styled else ""
        return new + self._join.rest()


async def _rest(
    pieces: AsyncIterator[Piece], lines: AsyncIterator[str], usage: Usage | None
) -> Usage | None:
    """Returns the usage that follows an answer's end, if it comes at once; else the one that is
    known. It reads to the end of the body, because the connection can then be used again: a new one
    costs round trips before the next first token."""
    with contextlib.suppress(TimeoutError, UpstreamError, httpx.HTTPError):
        if usage is None:
            async with asyncio.timeout(_USAGE_SECONDS):
                async for piece in pieces:
                    usage = piece.usage
                    if usage is not None:
                        break
        async with asyncio.timeout(_REST_SECONDS):
            async for piece in pieces:
                usage = piece.usage or usage
            async for _ in lines:
                pass
    return usage


def _named(message: str, fields: Iterable[str]) -> str | None:
    """Returns the first of these fields that an error's message names as a word; None if it names
    none."""
    first_place: dict[str, int] = {}
    for name in fields:
        found = re.search(rf"\b{name}\b", message)
        if found is not None:
            first_place[name] = found.start()
    if not first_place:
        return None
    return min(first_place, key=lambda name: first_place[name])


async def _whole(response: httpx.Response, most: int = _MOST_BODY) -> bytes:
    """Read a whole body; an error where it is longer than `most` bytes."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > most:
            raise UpstreamError("the upstream's answer is too long")
    return bytes(body)


def _scores(
    upstream: Upstream, how: Dialect, asked: Continuation, answer: bytes
) -> tuple[Any, tuple[Candidates, ...]]:
    """Returns an upstream's answer to a request for scores as JSON, and the candidates that it
    tells.

    One answer without scores may be a login page of the network. An upstream that sends several in
    a row answers otherwise than its dialect says: it is asked to write instead.
    """
    try:
        decoded = _decoded(answer)
        candidates = how.scored(decoded, asked)
    except UpstreamError as error:
        upstream.without_scores += 1
        if upstream.without_scores < _MOST_WITHOUT_SCORES:
            raise
        raise NotScoredError(error.line()) from None
    upstream.without_scores = 0
    return decoded, candidates


def _decoded(body: bytes) -> Any:
    """A body's JSON; an error where it is none."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UpstreamError(
            "the upstream answers with something that is not JSON: is it a login page of the network?"
        ) from None


def _check(
    response: httpx.Response, body: bytes, upstream: Upstream, how: Dialect | None = None
) -> None:
    """Raise the error that a status other than 200 means: a wrong key, a prompt that is too long, a
    request that is refused, a path below the upstream's address that it does not have, or an
    upstream that cannot answer now. `how` it was asked; None: for its models."""
    status = response.status_code
    if status == httpx.codes.OK:
        return
    try:
        said = error_text(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = f"HTTP {status}"
    if status == httpx.codes.UNAUTHORIZED:
        raise UpstreamError(
            f"the upstream refuses the key: {said}",
            later=False,
            always=True,
            hint="set MOA_UPSTREAM_KEY, or --upstream-key-file",
        )
    if status == httpx.codes.FORBIDDEN:
        raise UpstreamError(
            f"the upstream refuses this request: {said}",
            later=False,
            hint="HTTP 403: what this key may use is its to say, or it does not want this text",
        )
    if status in (408, 425, 429) or status >= 500 or status < 400:
        words = said if said.startswith("HTTP ") else f"{said} (HTTP {status})"
        raise UpstreamError(
            f"the upstream cannot answer now: {words}", retry_after=_pause(response)
        )
    if status in (400, 413, 422) and _is_about_length(said):
        raise TooLongError(f"too long for the upstream: {said}")
    if status in (400, 422):
        raise RefusedError(f"the upstream refuses the request: {said}")
    # A service also says so of a model.
    is_about_path = status in (404, 405) and "model" not in said.lower()
    if is_about_path and how is not None:
        raise _no_route(upstream, how)
    raise UpstreamError(
        f"the upstream refuses the request: {said}",
        later=False,
        hint=f"is {upstream.url} its address?" if is_about_path else "",
    )


def _no_route(upstream: Upstream, how: Dialect) -> NoRouteError:
    """The error for an upstream that is not to be asked so, or not at this address."""
    other = "completions" if how.takes == "chat" else "chat"
    path = httpx.URL(f"{upstream.url}/").join(how.path()).path
    return NoRouteError(
        f"the upstream has no route {safe_line(path)}",
        hint=f"pass --upstream-api {other}, or is {upstream.url} not its address?",
    )


def _pause(response: httpx.Response) -> float:
    """The seconds that a response asks to wait by `retry-after`; 0 without one, or for a date."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0


def _is_about_length(message: str) -> bool:
    """Whether an error's message is about a prompt that is too long; each service has its own words."""
    words = message.lower()
    return "context" in words or "too long" in words or "maximum" in words


def _unreachable(error: httpx.HTTPError, upstream: Upstream) -> UpstreamError:
    """The error for an upstream that no connection, or no answer, came from. Where nothing ever has,
    the address may be wrong."""
    hint = ""
    if upstream.facts is None and upstream.heard_at == float("-inf"):
        hint = f"is {upstream.url} its address?"
        if speaks_no_tls(error):
            hint = f"did you mean {upstream.url.replace('https://', 'http://', 1)}?"
    return UpstreamError(f"the upstream {no_answer(error)}", reached=False, hint=hint)


def _silent() -> UpstreamError:
    """The error for an upstream that does not answer any more."""
    return UpstreamError("the upstream is silent", reached=False)


def _chosen(models: Sequence[dict[str, Any]], wanted: str) -> UpstreamFacts:
    """Returns the model of this name from an upstream's list, or the only one if no name is given.
    A name that is a file's path may be given without its folders. An error names some of those that
    there are."""
    by_name = {str(model.get("id")): model for model in models if model.get("id")}
    some_names = ", ".join(map(safe_line, list(by_name)[:8]))
    if wanted and wanted not in by_name:
        ending_so = [name for name in by_name if name.endswith(f"/{wanted}")]
        if len(ending_so) == 1:
            wanted = ending_so[0]
    if wanted and wanted not in by_name:
        raise UpstreamError(
            f"the upstream has no model {safe_line(wanted)!r}",
            later=False,
            hint=f"it has {some_names or 'none'}",
        )
    if not wanted and len(by_name) != 1:
        raise UpstreamError(
            f"the upstream has {len(by_name)} models: say which",
            later=False,
            hint=f"--upstream-model, one of {some_names}",
        )
    name = wanted or next(iter(by_name))
    return UpstreamFacts(model=name, owner=str(by_name[name].get("owned_by", "")))
