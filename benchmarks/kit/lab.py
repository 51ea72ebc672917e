"""A lab: a running verifier, a device, held-out prompts, and clients of the verifier over emulated
links."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack
from urllib.parse import urlsplit

from demo.held_out import skill_prompts
from demo.skills import Example, is_right
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.settings import ClientSettings, SettingChanges
from edge_client.tools.compare import TimedAnswer, ask
from edge_client.tools.emulated_network import PROFILES, Condition, LinkProxy, Profile
from moa.errors import UsageError
from testing.verifier import Pair, verifier

LINKS = ("wifi", "5g", "4g", "4g-weak", "bursty")
"""The paper's; the emulator has more."""
_ONLINE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Options of all experiments in which a device asks a verifier."""

    bundle: str = ""
    """Folder of the device's bundle; without it the embedded one."""
    target: str = ""
    """Folder of the verifier's target; without it the embedded one."""
    drafter: str = ""
    """Folder of the verifier's drafter."""
    per_skill: int = 1
    """Held-out prompts of every skill."""
    prompts: int = 0
    """Use this many of them, of all kinds; 0 takes all."""
    tokens: int = 96
    """Tokens of an answer at most."""


@dataclass
class Lab:
    """The environment of a device's experiments."""

    url: str
    device: Device
    examples: list[Example]
    prompts: list[list[int]]

    def link(self, name: str, *, turn: float = 0.0, seed: int = 0, url: str = "") -> LinkProxy:
        """An emulated link to the verifier, begun at the share `turn` of its cycle."""
        return link_to(url or self.url, turned(PROFILES[name], turn), seed=seed)

    @contextlib.asynccontextmanager
    async def client(
        self,
        via: LinkProxy | None = None,
        *,
        device: Device | None = None,
        online: bool = True,
        **changes: Unpack[SettingChanges],
    ) -> AsyncIterator[EdgeClient]:
        """A client, over a link or beside the verifier; with `online` it has a connection already."""
        settings: dict[str, Any] = {"verifier": via.url if via else self.url, **changes}
        async with EdgeClient(ClientSettings(**settings), device=device or self.device) as client:
            if online:
                await client.wait_online(_ONLINE_SECONDS)
            yield client

    async def answers(
        self,
        via: LinkProxy | None = None,
        *,
        device: Device | None = None,
        **changes: Unpack[SettingChanges],
    ) -> list[TimedAnswer]:
        """The answers to all prompts, each in a conversation of its own, one after another on one
        connection."""
        async with self.client(via, device=device, **changes) as client:
            return [await ask(client, ids) for ids in self.prompts]

    def right(self, number: int, text: str) -> bool:
        """Whether a text is a right answer to this prompt."""
        return is_right(self.examples[number], text.strip())


@contextlib.contextmanager
def open_lab(options: Asking, *flags: str, slots: int = 16) -> Iterator[Lab]:
    """A verifier that holds so many sessions at once, and a device beside it, for as long as the
    context lasts."""
    device, examples, prompts = load(options)
    with verifier(
        f"--slots={slots}", *flags, pair=Pair(options.target, options.drafter)
    ) as running:
        yield Lab(running.url, device, examples, prompts)


def load(options: Asking) -> tuple[Device, list[Example], list[list[int]]]:
    """The device, the exercises, and their ids."""
    device = Device.load(options.bundle)
    examples = skill_prompts(options.per_skill)
    if options.prompts:
        wanted = min(options.prompts, len(examples))
        examples = [examples[n * len(examples) // wanted] for n in range(wanted)]
    encoder = EdgeClient(ClientSettings(), device=device)
    return (
        device,
        examples,
        [encoder.encode(example.prompt, raw=not device.codec.can_chat) for example in examples],
    )


def link_to(url: str, profile: Profile, *, seed: int = 0) -> LinkProxy:
    """A link to this address; used as a context manager."""
    parts = urlsplit(url)
    if parts.scheme != "ws" or parts.hostname is None or parts.port is None:
        raise UsageError("the emulated link needs a ws://HOST:PORT address")
    return LinkProxy(parts.hostname, parts.port, profile, seed=seed)


def turned(profile: Profile, share: float) -> Profile:
    """The same profile, started elsewhere in its cycle: a run shorter than the cycle must not
    always see its start."""
    total = sum(seconds for seconds, _ in profile.phases)
    if not total:
        return profile
    ahead = share % 1 * total
    phases = list(profile.phases)
    while ahead >= phases[0][0]:
        ahead -= phases[0][0]
        phases = [*phases[1:], phases[0]]
    (first, condition), *others = phases
    return Profile(((first - ahead, condition), *others, *([(ahead, condition)] if ahead else [])))


def mean_over(profile: Profile, figure: Callable[[Condition], float]) -> float:
    """The mean of a link's figure over the whole cycle; a link of one phase has no end."""
    total = sum(seconds for seconds, _ in profile.phases)
    if not total:
        return figure(profile.phases[0][1])
    return sum(seconds * figure(condition) for seconds, condition in profile.phases) / total


def mean_rtt(profile: Profile) -> float:
    """Milliseconds of a round trip."""
    return mean_over(profile, lambda condition: condition.rtt_ms)
