"""A verifier in front of somebody else's engine: sessions, streams and resumes are ours, text is theirs."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from cloud_verifier.engine.contract import ModelFacts, Report
from cloud_verifier.engine.job import Job
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from cloud_verifier.server import Server
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.sessions.service import Service
from cloud_verifier.settings import Settings
from cloud_verifier.upstream.client import Abilities, Upstreams
from cloud_verifier.upstream.contract import UpstreamError
from cloud_verifier.upstream.engine import UpstreamEngine
from cloud_verifier.upstream.figures import Figures
from cloud_verifier.upstream.spending import Prices, Spending, in_words
from cloud_verifier.upstream.watch import Watch
from moa.bundle import Bundle
from moa.errors import UsageError
from moa.grammar.matcher import GrammarCompiler
from moa.process.secret_files import exposed
from moa.safe_text import safe_line
from moa.tokenizer_file import read_tokenizer
from moa.version import running_version

KEY_VARIABLE = "MOA_UPSTREAM_KEY"
_SESSIONS = 4096
"""Sessions whose log may be held: none of them takes memory of a model here."""
_LARGEST_KEY = 4096
_PROBED_SECONDS = 0.3
"""For so long the start waits for the upstream's list of models."""
_BUDGET_SECONDS = 1.0
"""Between two looks whether there is money again."""
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
        self._added = ""
        """The text of the start token that engines put before a text themselves; empty where they
        add none. This tokenizer says whether they do: a model's own is the same, and a chat template
        writes a start token whether or not the tokenizer adds one."""
        added = self._with_special.encode("", add_special_tokens=True).ids
        if files.bos_id is not None and added[:1] == [files.bos_id]:
            self._added = self._with_special.id_to_token(files.bos_id) or ""

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
        """Text with special tokens, but for a start token that engines add themselves."""
        text = str(self._with_special.decode(list(ids), skip_special_tokens=False))
        return text.removeprefix(self._added)


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
        prices = Prices(
            read=settings.upstream_price_in,
            written=settings.upstream_price_out,
            budget=settings.upstream_budget,
        )
        spending = Spending(prices, reached=self._budget_reached)
        self._spending = spending
        self.engine = UpstreamEngine(
            upstreams,
            encode=tokens.encode,
            decode=tokens.decode,
            prompt=tokens.prompt,
            eos_ids=tokens.eos_ids,
            spending=spending,
            post=self._take_soon,
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
            has_engine_behind=True,
            takes_messages=upstreams.takes_messages,
            grammars=bool(tokens.eos_ids),
        )
        grammars = GrammarCompiler(tokens.as_json, size=tokens.vocab_size, eos_ids=tokens.eos_ids)
        service = Service(facts, settings.limits, self.engine, metrics=Metrics(), grammars=grammars)
        super().__init__(service, settings, auth)
        self._budget = settings.upstream_budget
        figures = Figures(self.metrics.registry)
        figures.begin(upstreams.addresses)
        figures.money(prices.budget, lambda: spending.spent if spending.limited else 0.0)
        self._watch = Watch(upstreams, lambda: self.engine.running, self.engine.awaited_for)
        self._probing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None
        self._was_away = ""
        """Why no upstream answered when that was last looked at; empty if one did."""
        self._has_looked = False
        """Whether it is known at all."""
        self._was_over = ""
        """That the budget was spent when that was last looked at, in words; empty if it was not."""
        upstreams.encode = tokens.encode
        upstreams.figures = figures
        upstreams.learned = self._learn
        upstreams.changed = self._changed
        self._learn()

    def _take_soon(self, reports: list[Report]) -> None:
        """Have the event loop take the engine's reports. This engine runs in the loop itself: a
        call from a thread would write to a socket for each token, to wake it."""
        if self._loop is not None:
            self._loop.call_soon(self.service.take, reports)

    def _changed(self) -> None:
        """Log that upstreams have begun or ceased to answer, and tell all devices; these also where
        they are away for another reason than before."""
        away = self.upstreams.away
        if self._has_looked and bool(away) == bool(self._was_away):
            self._was_away = away
            self._learn()
            return
        if away and self._has_looked:
            log.warning(
                "no upstream answers, devices go on alone: %s",
                away,
                extra={"event": "upstream_away"},
            )
        elif self._has_looked:
            log.info("an upstream answers again", extra={"event": "upstream_back"})
        self._has_looked = True
        self._was_away = away
        self._learn()

    def _budget_reached(self, part: float) -> None:
        """Log that this part of the budget is spent, and tell all devices where that is all."""
        _tell_of_the_budget(self._budget, part)
        self._look_at_the_budget()

    def _look_at_the_budget(self) -> None:
        """Tell all devices that the budget is spent, or that there is more of it again."""
        over = self._spending.why_over
        if over != self._was_over:
            self._was_over = over
            self._learn()

    async def _keep_counting(self) -> None:
        """Look at the budget for ever: money of a day ago counts no more."""
        while True:
            await asyncio.sleep(_BUDGET_SECONDS)
            self._look_at_the_budget()

    @property
    def _why_nothing(self) -> str:
        """Why nothing is asked of an upstream now, as far as is known; empty if it is."""
        return self._was_away or self._was_over

    def _learn(self) -> None:
        """Tell devices that connect from now on what the upstreams, the engines behind HTTP, can
        do."""
        able = self.upstreams.abilities
        notices = [_notice(able)] if able.scores else []
        if self._why_nothing:
            notices.append(f"upstream_away: {self._why_nothing}")
        if self.upstreams.takes_chats_alone:
            notices.append("chats_only: the upstream continues no text that is no chat")
        # A name by the settings alone would say that something has answered.
        model = self.upstreams.model if self._has_looked else ""
        self.service.behind(safe_line(model), safe_line(self._why_nothing))
        info = self.metrics.info
        info.clear()
        info.labels(
            version=running_version(),
            model=self.upstreams.model,
            dtype="",
            device="upstream",
            decoder=self.upstreams.spoken,
            computes="",
        ).set(1)
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

    def unready(self) -> str:
        """Why it should get no new devices: no upstream answers, or none may be asked."""
        return self._watch.unready() or self._was_over

    async def look(self) -> None:
        """Have the upstreams looked at, where nothing was heard of them lately."""
        await self._watch.look_if_old()

    def works(self) -> bool:
        """Whether an upstream has answered something just now. One that is silent may be reading a
        prompt, or be gone."""
        return self._watch.is_alive

    def read_for(self, job: Job) -> int | None:
        """Returns how many tokens the upstream has read for this job's request, as far as it says
        so. One that is silent in mid-answer is not at work for all that is known: None."""
        return self.engine.read_for(job)

    async def start_engine(self) -> None:
        """Ask what answers there. Nobody waits for it: without a network a device is served, too."""
        if self._budget:
            log.info(
                "the upstream's budget for 24 hours is %s",
                in_words(self._budget),
                extra={"event": "budget"},
            )
            self._counting = asyncio.create_task(self._keep_counting())
        self._probing = asyncio.create_task(self._probe())
        # Devices that connect at once are then told what the upstream can do.
        await asyncio.wait({self._probing}, timeout=_PROBED_SECONDS)
        self._watching = asyncio.create_task(self._look_on(self._probing))

    async def _look_on(self, probing: asyncio.Task[None]) -> None:
        """Look at the upstreams whenever that is needed, once they have been asked for the first
        time."""
        await probing
        await self._watch.run()

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
        else:
            log.info(
                "upstream",
                extra={
                    "event": "upstream",
                    "target": facts.model,
                    "upstream_api": self.upstreams.spoken,
                },
            )

    async def stop_engine(self) -> None:
        """End what runs."""
        helpers = (self._probing, self._watching, self._counting)
        tasks = [task for task in helpers if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.engine.stop()


def _tell_of_the_budget(budget: float, part: float) -> None:
    """Log that a budget of money is nearly or all used up."""
    if part >= 1:
        log.error(
            "the upstream's budget of %s for 24 hours is spent: devices go on alone",
            in_words(budget),
            extra={"event": "budget"},
        )
    else:
        log.warning(
            "%.0f %% of the upstream's budget of %s for 24 hours are spent",
            100 * part,
            in_words(budget),
            extra={"event": "budget"},
        )


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
    """The key that a file holds; a `UsageError` where it cannot be read, or holds none: somebody may
    be about to write it."""
    if problem := exposed(file):
        log.warning("the upstream's key: %s", problem, extra={"event": "upstream"})
    try:
        with file.open(encoding="ascii") as opened:
            key = opened.read(_LARGEST_KEY).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the upstream's key: {error}") from None
    if not key:
        raise UsageError(
            f"there is no key in {file}", hint="for an upstream without one leave the file out"
        )
    return key


def _embedded() -> Path:
    """The folder of the bundle that the installation comes with."""
    from moa import demo  # imported here: whoever has a bundle does not need it

    return Path(demo.paths().bundle)
