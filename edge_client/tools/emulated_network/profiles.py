"""Properties of an emulated link over time.

The named profiles are this project's own choices, made from published measurements of such links; they are not
figures of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moa.errors import UsageError


@dataclass(frozen=True, slots=True)
class Condition:
    """A link's properties at one time. Rates are megabits a second (0 is unlimited), loss is a share of packets."""

    rtt_ms: float = 0.0
    down_mbps: float = 0.0
    up_mbps: float = 0.0
    loss: float = 0.0
    jitter: float = 0.1
    """Spread of the one-way delay, as a share of it."""
    out: bool = False
    """No bytes pass in either direction, and neither end gets an error."""

    def __post_init__(self) -> None:
        if min(self.rtt_ms, self.down_mbps, self.up_mbps, self.jitter) < 0 or not 0 <= self.loss < 1:
            raise UsageError(f"link condition out of range: {self}")


@dataclass(frozen=True, slots=True)
class Profile:
    """Conditions with their durations in seconds, repeated. A duration of 0 is unlimited."""

    name: str
    phases: tuple[tuple[float, Condition], ...]

    def at(self, seconds: float) -> Condition:
        """The condition at this time after the start."""
        total = sum(duration for duration, _ in self.phases)
        if total > 0:
            seconds %= total
        for duration, condition in self.phases:
            if duration == 0 or seconds < duration:
                return condition
            seconds -= duration
        return self.phases[-1][1]


def _steady(name: str, *, rtt: float, down: float, up: float, loss: float) -> Profile:
    return Profile(name, ((0.0, Condition(rtt, down, up, loss)),))


_4G = Condition(rtt_ms=60, down_mbps=20, up_mbps=8, loss=0.005)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("loopback", ((0.0, Condition()),)),
        _steady("wifi", rtt=10, down=100, up=50, loss=0.002),
        _steady("5g", rtt=20, down=100, up=20, loss=0.001),
        Profile("4g", ((0.0, _4G),)),
        _steady("4g-weak", rtt=150, down=2, up=1, loss=0.02),
        Profile("bursty", ((8.0, Condition(40, 30, 15)), (2.0, Condition(250, 5, 2)))),
        Profile("outage", ((10.0, _4G), (5.0, replace(_4G, out=True)))),
    )
}
