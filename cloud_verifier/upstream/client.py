"""Asks upstreams over HTTP: one after another where one fails, with a pause for each that did."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2 as httpx
import msgspec

from cloud_verifier.logs import log
from cloud_verifier.upstream.contract import (
    Continuation,
    Dialect,
    NotScoredError,
    Piece,
    RefusedError,
    TooLongError,
    UpstreamError,
    UpstreamFacts,
    Usage,
)
from cloud_verifier.upstream.dialects import dialect
from cloud_verifier.upstream.joining import ContradictedError, Way
from cloud_verifier.upstream.json_style import JsonStyle
from cloud_verifier.upstream.lines import bounded_lines, error_text, openai_usage
from cloud_verifier.upstream.tokens import Encode
from moa.errors import UsageError
from moa.safe_text import safe_line

_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 60.0
"""Without a byte; a long prompt is read without one."""
_PROBE_SECONDS = 10.0
_MOST_BODY = 2**20
"""Bytes of an answer that is no stream: a list of models, an error."""
_USAGE_SECONDS = 1.0
"""For so long an answer that has ended waits for its usage."""
_REST_SECONDS = 0.05
"""For so long it waits for the end of the body, which engines send at once."""
_MOST_CANDIDATE_BYTES = 256
"""Of JSON that tells of one candidate: id, number, rank and text."""
_TOKENIZED = "def size(of):  # Größe in µm\n    return 1234567 * of['x']  # 大小 🙂 don't\n"
"""A text whose tokens are hardly the same in two tokenizers."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
"""Seconds before an upstream that failed is asked again: doubled each time."""
_LONGEST_ASKED_PAUSE = 300.0
"""Seconds of a `retry-after` that are believed."""


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
    """Whether it has refused to score tokens."""
    pause: float = 0.0
    not_before: float = 0.0

    def failed(self, now: float, asked: float) -> None:
        """Not again for a while."""
        self.pause = min(max(2 * self.pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        self.not_before = now + max(self.pause, min(asked, _LONGEST_ASKED_PAUSE))

    def worked(self) -> None:
        """It has answered."""
        self.pause = 0.0
        self.not_before = 0.0


def address_of(url: str) -> str:
    """An address as it is used: with scheme, without a slash at the end, below /v1 by default."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{safe_line(url)!r} is no address of an upstream", hint="such as http://gpu:8000/v1"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            "an upstream's address has no user, query or fragment",
            hint="give the key in MOA_UPSTREAM_KEY or with --upstream-key-file",
        )
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


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
        self._all = [Upstream(address_of(address), key) for address in addresses]
        self._model = model
        self._interface = interface
        self._clock = clock
        self.encode: Encode | None = None
        """The device's tokenizer, for engines that take tokens: theirs must be the same."""
        self.learned: Callable[[], None] = lambda: None
        """Called when more is known of what they can do."""
        if interface != "auto":
            dialect(interface)  # a wrong name is said now
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(_SILENT_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            follow_redirects=False,  # a portal redirects; keys go nowhere else
            transport=transport,
        )

    @property
    def takes_messages(self) -> bool:
        """Whether an upstream may take conversations: where it is not known yet, too."""
        return self._interface == "auto" or dialect(self._interface).takes == "chat"

    @property
    def abilities(self) -> Abilities:
        """What all of them can do; nothing beside writing while one is unknown."""
        known = [self._dialect(one) for one in self._all]
        if self._interface == "auto" and any(one.facts is None for one in self._all):
            return Abilities()
        return Abilities(
            scores=all(how.scores for how in known)
            and not any(one.refuses_scores for one in self._all),
            candidates=min(how.most_candidates for how in known),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def probe(self) -> UpstreamFacts:
        """Ask for the model; raises what is wrong with the last upstream if none answers."""
        error = UpstreamError("no upstream is given", later=False)
        for upstream in self._all:
            try:
                return await self._facts(upstream)
            except UpstreamError as failed:
                error = failed
        raise error

    async def go_on(self, asked: Continuation) -> AsyncGenerator[Piece, None]:
        """Pieces of text or tokens that follow. An upstream that fails before its first piece is
        replaced by the next one."""
        error = UpstreamError("no upstream may be asked yet", retry_after=self._wait())
        for upstream in self._all:
            if upstream.not_before > self._clock():
                continue
            begun = False
            try:
                async with contextlib.aclosing(self._ask(upstream, asked)) as pieces:
                    async for piece in pieces:
                        begun = True
                        upstream.worked()
                        yield piece
                return
            except UpstreamError as failed:
                error = failed
                if not failed.later:
                    raise
                upstream.failed(self._clock(), failed.retry_after)
                log.warning(
                    "the upstream failed: %s",
                    safe_line(failed.line()),
                    extra={"event": "upstream", "url": upstream.url},
                )
                if begun:
                    raise
        raise UpstreamError(str(error), retry_after=self._wait())

    def _wait(self) -> float:
        """Seconds until one may be asked."""
        return max(0.0, min(one.not_before for one in self._all) - self._clock())

    async def _facts(self, upstream: Upstream) -> UpstreamFacts:
        if upstream.facts is None:
            listed = await self._models(upstream)
            facts = _chosen(listed, self._model)
            upstream.same_tokens = await self._has_same_tokens(upstream, facts)
            upstream.facts = facts
            self.learned()
        return upstream.facts

    def _dialect(self, upstream: Upstream) -> Dialect:
        """How it is asked, as far as that is known. An engine that takes tokens is asked by chats
        where it does not say that they are the device's: others would make senseless text."""
        owner = upstream.facts.owner if upstream.facts is not None else ""
        host = urlsplit(upstream.url).hostname or ""
        same_tokens = self.encode is None or upstream.same_tokens is True
        return dialect(self._interface, owner, host, same_tokens=same_tokens)

    async def _has_same_tokens(self, upstream: Upstream, facts: UpstreamFacts) -> bool | None:
        """Whether a text has the same tokens there as on the device; None where it does not say."""
        host = urlsplit(upstream.url).hostname or ""
        how = dialect(self._interface, facts.owner, host)
        if how.takes != "tokens" or self.encode is None:
            return None
        try:
            async with self._http.stream(
                "POST",
                httpx.URL(f"{upstream.url}/").join("../tokenize"),
                headers=how.headers(upstream.key),
                json=how.tokenize_body(_TOKENIZED, facts.model),
                timeout=_PROBE_SECONDS,
            ) as response:
                body = await _whole(response)
                if response.status_code != httpx.codes.OK:
                    return None
        except httpx.HTTPError as error:
            raise _unreachable(error) from None
        answer = _decoded(body)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            return None
        return bool(tokens == list(self.encode(_TOKENIZED)))

    async def _models(self, upstream: Upstream) -> list[dict[str, Any]]:
        """Those that it lists. One without a list is believed to have the model that is asked for."""
        try:
            async with self._http.stream(
                "GET",
                f"{upstream.url}/models",
                headers=self._dialect(upstream).headers(upstream.key),
                timeout=_PROBE_SECONDS,
            ) as response:
                body = await _whole(response)
                if response.status_code in (404, 405) and self._model:
                    return [{"id": self._model}]
                _check(response, body)
        except httpx.HTTPError as error:
            raise _unreachable(error) from None
        found = _decoded(body)
        models = found.get("data") if isinstance(found, dict) else None
        if not isinstance(models, list):
            raise UpstreamError("the upstream's list of models is none")
        return [model for model in models if isinstance(model, dict)]

    async def _ask(self, upstream: Upstream, asked: Continuation) -> AsyncGenerator[Piece, None]:
        """In one way after another, until an answer fits the text that is there."""
        model = (await self._facts(upstream)).model
        how = self._dialect(upstream)
        if how.takes == "tokens" and upstream.same_tokens is False:
            raise UpstreamError(
                "the upstream's tokenizer is not the one of the device's bundle",
                later=False,
                hint="--upstream-api chat, or the bundle of a small model of the same family",
            )
        if asked.draft:
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
                log.info("another answer than before", extra={"event": "upstream", "way": way})
            except RefusedError as error:
                if way != "behind" or way == ways[-1]:
                    raise
                upstream.refuses.add(way)
                log.warning(
                    "the upstream does not go on with an answer: it is asked anew (%s)",
                    safe_line(error.line()),
                    extra={"event": "upstream", "url": upstream.url},
                )
        raise UpstreamError("the upstream does not go on with its own answer", later=False)

    async def _score(
        self, upstream: Upstream, how: Dialect, asked: Continuation, model: str
    ) -> Piece:
        """What it thinks of a draft."""
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
                _check(response, answer)
            decoded = _decoded(answer)
            return Piece(
                candidates=how.scored(decoded, asked),
                usage=openai_usage(decoded) if isinstance(decoded, dict) else None,
            )
        except httpx.HTTPError as error:
            raise _unreachable(error) from None
        except (RefusedError, NotScoredError) as error:
            upstream.refuses_scores = True
            log.warning(
                "the upstream does not check drafts: it writes alone (%s)",
                safe_line(error.line()),
                extra={"event": "upstream", "url": upstream.url},
            )
            self.learned()
            raise NotScoredError(error.line()) from None

    async def _once(
        self, upstream: Upstream, how: Dialect, asked: Continuation, model: str
    ) -> AsyncGenerator[Piece, None]:
        """One request; fields that the service refuses are left out, and it is sent again."""
        url = httpx.URL(f"{upstream.url}/").join(how.path())
        for _ in range(len(how.optional) + 1):
            body = how.body(asked, model)
            for name, other in how.optional.items():
                if name in upstream.lacks and name in body:
                    value = body.pop(name)
                    if other:
                        body[other] = value
            try:
                async with self._http.stream(
                    "POST", url, headers=how.headers(upstream.key), json=body
                ) as response:
                    if response.status_code != httpx.codes.OK:
                        _check(response, await _whole(response))
                    async for piece in _pieces(response, how, asked):
                        yield piece
                    return
            except httpx.HTTPError as error:
                raise _unreachable(error) from None
            except RefusedError as error:
                refused = _named(str(error), how.optional.keys() & body.keys())
                if refused is None:
                    raise
                upstream.lacks.add(refused)
                log.warning(
                    "the upstream takes no %s: its text is by its own default or chance",
                    refused,
                    extra={"event": "upstream", "url": upstream.url},
                )


async def _pieces(
    response: httpx.Response, how: Dialect, asked: Continuation
) -> AsyncGenerator[Piece, None]:
    """What is new in a streamed answer."""
    kind = response.headers.get("content-type", "")
    if not kind.startswith(("text/event-stream", "application/x-ndjson")):
        raise UpstreamError(f"the upstream answers with {safe_line(kind)!r}, no stream")
    join = how.join(asked)
    style = None
    if asked.grammar is not None and asked.grammar.kind == "json_schema":
        style = JsonStyle("" if asked.way == "anew" else asked.begun)
    room = asked.most
    lines = bounded_lines(response.aiter_bytes())
    told = how.pieces(lines)
    async for piece in told:
        room -= len(piece.ids)
        text = style.add(piece.text) if style is not None else piece.text
        text = join.add(text) if text else ""
        usage = piece.usage
        if piece.ending:
            text += join.rest()
            waited = _USAGE_SECONDS if asked.wants_usage and usage is None else _REST_SECONDS
            usage = await _rest(told, lines, waited) or usage
        if text != piece.text or usage is not piece.usage:
            piece = dataclasses.replace(piece, text=text, usage=usage)
        yield piece
        if piece.ending or room < 0:
            return


async def _rest(
    pieces: AsyncIterator[Piece], lines: AsyncIterator[str], seconds: float
) -> Usage | None:
    """The usage behind an answer's end, if it comes at once. Read to the end of the body, as a
    connection can be used again then: a new one costs round trips before the next first token."""
    usage = None
    with contextlib.suppress(TimeoutError, UpstreamError, httpx.HTTPError):
        async with asyncio.timeout(seconds):
            async for piece in pieces:
                usage = piece.usage or usage
            async for _ in lines:
                pass
    return usage


def _named(said: str, fields: Iterable[str]) -> str | None:
    """The field that an error names, the first one."""
    places = {name: re.search(rf"\b{name}\b", said) for name in fields}
    found = {name: place.start() for name, place in places.items() if place is not None}
    return min(found, key=lambda name: found[name], default=None)


async def _whole(response: httpx.Response, most: int = _MOST_BODY) -> bytes:
    """A body of so many bytes at most."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > most:
            raise UpstreamError("the upstream's answer is too long")
    return bytes(body)


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UpstreamError(
            "the upstream answers with something that is not JSON: is it a login page of the network?"
        ) from None


def _check(response: httpx.Response, body: bytes) -> None:
    """Raise what a status other than 200 means."""
    status = response.status_code
    if status == httpx.codes.OK:
        return
    try:
        said = error_text(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = f"HTTP {status}"
    if status in (401, 403):
        raise UpstreamError(
            f"the upstream refuses the key: {said}",
            later=False,
            hint="set MOA_UPSTREAM_KEY, or --upstream-key-file",
        )
    if status in (408, 425, 429) or status >= 500 or status < 400:
        raise UpstreamError(f"the upstream cannot answer now: {said}", retry_after=_pause(response))
    if status in (400, 413, 422) and _is_about_length(said):
        raise TooLongError(f"too long for the upstream: {said}")
    if status in (400, 422):
        raise RefusedError(f"the upstream refuses the request: {said}")
    raise UpstreamError(f"the upstream refuses the request: {said}", later=False)


def _pause(response: httpx.Response) -> float:
    """Seconds of `retry-after`; a date is not read."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0


def _is_about_length(said: str) -> bool:
    words = said.lower()
    return "context" in words or "too long" in words or "maximum" in words


def _unreachable(error: httpx.HTTPError) -> UpstreamError:
    what = safe_line(str(error)) or type(error).__name__
    return UpstreamError(f"the upstream is not reached: {what}")


def _chosen(models: Sequence[dict[str, Any]], wanted: str) -> UpstreamFacts:
    """The model that is wanted, or the only one."""
    named = {str(model.get("id")): model for model in models if model.get("id")}
    if wanted and wanted not in named:
        raise UpstreamError(
            f"the upstream has no model {safe_line(wanted)!r}",
            later=False,
            hint=f"it has {', '.join(map(safe_line, list(named)[:8])) or 'none'}",
        )
    if not wanted and len(named) != 1:
        raise UpstreamError(
            f"the upstream has {len(named)} models: say which",
            later=False,
            hint=f"--upstream-model, one of {', '.join(map(safe_line, list(named)[:8]))}",
        )
    name = wanted or next(iter(named))
    return UpstreamFacts(model=name, owner=str(named[name].get("owned_by", "")))
