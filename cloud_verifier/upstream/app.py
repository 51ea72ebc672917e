"""A verifier in front of somebody else's engine: sessions, streams and resumes are ours, text is theirs."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from cloud_verifier.engine.contract import ModelFacts
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from cloud_verifier.server import Server
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.sessions.service import Service
from cloud_verifier.settings import Settings
from cloud_verifier.upstream.client import Abilities, Upstreams
from cloud_verifier.upstream.contract import UpstreamError
from cloud_verifier.upstream.engine import UpstreamEngine
from cloud_verifier.upstream.spending import Prices, Spending
from moa.bundle import Bundle
from moa.errors import UsageError
from moa.grammar.matcher import GrammarCompiler
from moa.process.secret_files import exposed
from moa.tokenizer_file import read_tokenizer

KEY_VARIABLE = "MOA_UPSTREAM_KEY"
_SESSIONS = 4096
"""Sessions whose log may be held: none of them takes memory of a model here."""
_LARGEST_KEY = 4096
_PROBED_SECONDS = 0.3
"""For so long the start waits for the upstream's list of models."""
_PROMISE = "the text is what the upstream engine answered, as it answered it"
_PROMISE_OF_CHECKS = (
    "the text is what the upstream engine answered, or what follows from its log-probabilities"
)


class DeviceTokens:
    """The devices' tokenizer, as their bundle has it."""

    def __init__(self, bundle: Bundle) -> None:
        """Load the tokenizer of a bundle; a `UsageError` for a bundle without one."""
        files = bundle.manifest.tokenizer
        if files.file is None:
            raise UsageError(f"{bundle.folder} has no tokenizer", hint="build it again with one")
        self.hash = files.hash
        self.eos_ids = files.eos_ids
        self._with_special = read_tokenizer(bundle.path(files.file))
        self._plain = read_tokenizer(bundle.path(files.file))
        self._plain.encode_special_tokens = True  # an upstream's text that looks like one is text
        self._bos = ""
        """The text of the start token; empty without one."""
        if files.bos_id is not None:
            self._bos = self._with_special.id_to_token(files.bos_id) or ""

    @property
    def vocab_size(self) -> int:
        """Special tokens included."""
        return int(self._with_special.get_vocab_size(with_added_tokens=True))

    def as_json(self) -> str:
        """The content of its file."""
        return str(self._with_special.to_str())

    def encode(self, text: str) -> list[int]:
        """A piece of text from the middle of an answer."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._plain.decode(list(ids), skip_special_tokens=True))

    def prompt(self, ids: Sequence[int]) -> str:
        """Text with special tokens, but for the start token: engines add that themselves."""
        text = str(self._with_special.decode(list(ids), skip_special_tokens=False))
        return text.removeprefix(self._bos)


class UpstreamVerifier(Server):
    """Sessions here, the target at `--upstream`."""

    def __init__(
        self,
        settings: Settings,
        upstreams: Upstreams,
        auth: Authenticator | None = None,
    ) -> None:
        tokens = DeviceTokens(Bundle.open(settings.bundle or _embedded()))
        self.upstreams = upstreams
        self.engine = UpstreamEngine(
            upstreams,
            encode=tokens.encode,
            decode=tokens.decode,
            prompt=tokens.prompt,
            eos_ids=tokens.eos_ids,
            spending=Spending(
                Prices(
                    read=settings.upstream_price_in,
                    written=settings.upstream_price_out,
                    budget=settings.upstream_budget,
                )
            ),
            post=self._post,
            most_running=_SESSIONS,
            most_guesses=settings.limits.max_guess_tokens - 1,
        )
        facts = ModelFacts(
            target="",
            tokenizer=tokens.hash,
            drafter="",
            vocab_size=tokens.vocab_size,
            eos_ids=tokens.eos_ids,
            slots=_SESSIONS,
            capacity=settings.limits.max_context_tokens + settings.limits.max_tree_nodes,
            records=None,
            takes_guesses=False,
            tells_logprobs=False,
            counts_penalties=False,
            sends_records=False,
            promise=_PROMISE,
            takes_messages=upstreams.takes_messages,
            grammars=bool(tokens.eos_ids),
        )
        grammars = GrammarCompiler(tokens.as_json, size=tokens.vocab_size, eos_ids=tokens.eos_ids)
        service = Service(facts, settings.limits, self.engine, metrics=Metrics(), grammars=grammars)
        super().__init__(service, settings, auth)
        self._probing: asyncio.Task[None] | None = None
        self._trouble = ""
        """Why the upstream did not answer when this process started; empty once it has."""
        upstreams.encode = tokens.encode
        upstreams.learned = self._answered
        self._learn()

    def _answered(self) -> None:
        """The upstream has said what it is."""
        self._trouble = ""
        self._learn()

    def _learn(self) -> None:
        """Tell devices that connect from now on what the upstreams, the engines behind HTTP, can
        do."""
        able = self.upstreams.abilities
        notices = [_notice(able)] if able.scores else []
        if self._trouble:
            notices.append(f"upstream_away: {self._trouble}")
        self.service.facts = dataclasses.replace(
            self.service.facts,
            takes_guesses=able.scores,
            tells_logprobs=able.candidates > 0,
            notices=tuple(notices),
            promise=_PROMISE_OF_CHECKS if able.scores else _PROMISE,
        )

    def wrong(self) -> str:
        """Nothing: while the upstream is away devices are told so, and go on alone."""
        return self.engine.wrong()

    def works(self) -> bool:
        """Nobody knows: an upstream that is silent may be reading a prompt, or be gone."""
        return False

    async def start_engine(self) -> None:
        """Ask what answers there. Nobody waits for it: without a network a device is served, too."""
        self._probing = asyncio.create_task(self._probe())
        # Devices that connect at once are then told what the upstream can do.
        await asyncio.wait({self._probing}, timeout=_PROBED_SECONDS)

    async def _probe(self) -> None:
        """Ask the upstreams for their model, and log the answer, or what is wrong."""
        try:
            facts = await self.upstreams.probe()
        except UpstreamError as error:
            if error.later:
                log.warning(
                    "the upstream does not answer yet: %s",
                    error.line(),
                    extra={"event": "upstream"},
                )
            else:  # such as a wrong key: to wait does not mend it
                log.error(
                    "%s; devices go on alone until this is mended",
                    error.line(),
                    extra={"event": "upstream"},
                )
            self._trouble = error.line()
            self._learn()
        else:
            log.info("upstream", extra={"event": "upstream", "target": facts.model})

    async def stop_engine(self) -> None:
        """End what runs."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self.engine.stop()


def _notice(able: Abilities) -> str:
    """Of which texts drafts are checked."""
    return (
        "checked_drafts: the upstream scores drafts: greedy text, and sampled text with top-k of "
        f"{able.candidates} at most, by seed and position; other text it samples itself"
    )


def upstreams_of(settings: Settings) -> Upstreams:
    """Returns the upstreams that the settings name. Their key comes from a file or the environment,
    never from the arguments, which every user of a machine can read."""
    key = os.environ.get(KEY_VARIABLE, "")
    if settings.upstream_key_file is not None:
        key = _key_in(settings.upstream_key_file)
    if any(ord(character) < 33 or ord(character) > 126 for character in key):
        raise UsageError("an upstream's key is one word of ASCII")
    return Upstreams(
        settings.upstream,
        model=settings.upstream_model,
        interface=settings.upstream_api,
        key=key,
    )


def _key_in(file: Path) -> str:
    """The key that a file holds; a `UsageError` where it cannot be read."""
    if problem := exposed(file):
        log.warning("the upstream's key: %s", problem, extra={"event": "upstream"})
    try:
        with file.open(encoding="ascii") as opened:
            return opened.read(_LARGEST_KEY).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the upstream's key: {error}") from None


def _embedded() -> Path:
    """The folder of the bundle that the installation comes with."""
    from moa import demo  # imported here: whoever has a bundle does not need it

    return Path(demo.paths().bundle)
