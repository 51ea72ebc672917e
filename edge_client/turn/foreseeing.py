"""Guesses that are sent ahead to the verifier of a running stream. Pure.

The drafter grows a tree below the log's end while the device waits anyway. What is new of it, likely, and can still be
there in time goes up as `Foresee`. If the server drafts too, it has advanced by the tokens of a round trip by then:
only guesses beyond those are useful. If it does not, it waits for ours, and the first draft after a miss is sent when
it is as deep as a round's. With `chooses` the device changes between the two as it learns how often it is right.

`_held` mirrors what the verifier holds. A verifier without progress may have lost it: then everything is sent again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_client.turn.actions import Grow
from edge_client.turn.controller import GUESSED
from edge_client.turn.measuring import Measuring
from moa.speculation.guess_tree import GuessTree, GuessTreeGrower, neg_log_probs_of
from moa.tree import DraftTree, TreeShape
from moa.wire import Advanced, ClientSession
from moa.wire.messages import Foresee, Welcome

_LEAST_WAITING, _LEAST_BESIDE = 0.01, 0.1
"""Chance that a guess comes true, below which it is not made: where the verifier waits for it; where it drafts too."""
_KEPT = 0.25
"""Share of that chance above which a guess is sent along, but nothing is guessed behind it."""
_MOST = 256
"""Nodes of the tree."""
_BUNCH, _PLENTY = 6, 16
"""New nodes that are worth a message, while the verifier still has others; and where it has many."""
_AGAIN_SECONDS = 0.5
"""Wait beyond twice the usual time for an answer, after which guesses count as lost. Doubled every time."""
_MOST_AGAIN = 4


@dataclass
class Foreseeing:
    """The guesses of one turn."""

    measuring: Measuring
    wanted: bool = True
    """Whether the user and the budget allow it."""
    chooses: bool = False
    """Whether the server may draft, so that the device chooses when the verifier waits."""
    shape: TreeShape = field(default_factory=lambda: TreeShape.chain(4))
    """Of the draft that a round of the device would have."""
    _agreed: bool = False
    _held: GuessTree = field(default_factory=GuessTree)
    _round: tuple[bytes, int] | None = None
    _waits: bool = False
    """Whether the verifier is to wait for guesses."""
    _told: bool = False
    """Whether it knows that."""
    _settled_at: float = 0.0
    """When what it sends will be the answer to guesses, after it was told to wait."""
    _growth: GuessTreeGrower | None = None
    _about: int = 0
    """Length of the log that the tree was grown for."""
    _again_at: float = math.inf
    _again: int = 0
    """How often everything was sent again since the last token."""
    _asked_at: float | None = None
    """When guesses went to a verifier that waits and has none: what comes next is their answer."""

    @property
    def on(self) -> bool:
        """Whether this verifier supports guesses for streams."""
        return self.wanted and self._agreed

    def agreed(self, welcome: Welcome) -> None:
        """What this verifier can do."""
        self._agreed = {"foresee", "stream"} <= set(welcome.features)

    def lost(self) -> None:
        """A new connection or session: the verifier has no guesses any more."""
        self._held.clear()
        self._round, self._growth, self._asked_at = None, None, None

    def grew(self, action: Grow, growth: GuessTreeGrower) -> None:
        """The tree that was asked for."""
        self._growth, self._about = growth, len(action.ids)

    def advanced(self, event: Advanced, log: Sequence[int], now: float) -> None:
        """Tokens of a stream have joined the log."""
        if not event.tokens or event.path:
            return
        controller = self.measuring.controller
        if not self._waits and self.on:
            controller.beside.forward(bool(event.foreseen))
        won: tuple[int, bool] | None = None
        if self._growth is not None and self._about == len(log) - len(event.tokens):
            won = self._growth.won(event.tokens)
            controller.guessed(*won)
        if self._round is not None:
            outcome = self._held.judge(event.tokens)
            self.measuring.foresaw(outcome)
            if self._waits and self._told:  # a verifier that waits stands still where guesses end, whatever the reason
                ended = outcome in ("missed", "beyond")
                won = len(event.tokens) - ended, ended
        if won is not None:
            controller.streak.add(*won)
        if self._asked_at is not None:
            self.measuring.rtt.add(now - self._asked_at - (event.queue_ms + event.forward_ms) / 1000)
            self._asked_at = None
        self._again = 0
        self._held.follow(log)
        self._wait_again(now)

    def next(
        self, session: ClientSession, provisional: Sequence[int], remaining: int, now: float
    ) -> Foresee | Grow | None:
        """The most useful action for the running stream, if any."""
        stream = session.streaming
        if not self.on or stream is None:
            return None
        if self._round != (session.id, stream.round):
            self.lost()
            self._round, self._waits, self._told = (session.id, stream.round), stream.waits, stream.waits
            self._wait_again(now)
        if self.chooses:
            self._choose(remaining, now)
            if self._told != self._waits and (self._told or len(self._held)):
                return self._tell(session, DraftTree([session.log[-1]], [-1], [0.0]), (), now)
        if not self._waits and self.measuring.controller.beside.rests:
            return None
        if self._waits and now >= self._again_at:
            self._held.clear()
            self._again = min(self._again + 1, _MOST_AGAIN)
            self._wait_again(now)
        self._held.follow(session.log)
        least = _LEAST_WAITING if self._waits else _LEAST_BESIDE
        if provisional:  # it is what the device would guess, and it must be checked
            tokens = [session.log[-1], *provisional[: self.measuring.controller.max_nodes]]
            chain = DraftTree(tokens, list(range(-1, len(tokens) - 1)), [0.0] * len(tokens))
            return self._tell(session, chain, self._held.missing(chain), now)
        growth = self._growth
        if growth is None or self._about != len(session.log) or growth.root != session.log[-1]:
            return Grow(session.log, GUESSED, math.log(_KEPT * least))
        done = len(growth.tree) >= _MOST or growth.likeliest_open < math.log(least)
        lead = 0.0 if self._waits else self._lead()
        fresh = [
            node
            for node in self._held.missing(growth.tree)
            if growth.depths[node] > lead and growth.tree.scores[node] >= math.log(_KEPT * least)
        ]
        if done and not fresh and self._waits and not len(self._held):  # the verifier stands still: any guess will do
            fresh = sorted(self._held.missing(growth.tree), key=growth.tree.scores.__getitem__)[-1:]
        if fresh and (done or self._bunch(growth, fresh)):
            return self._tell(session, growth.tree, fresh, now)
        return None if done else Grow(session.log, GUESSED, math.log(_KEPT * least))

    def asks(self, now: float) -> bool:
        """Whether the latest message holds all guesses of the verifier, and was not sent before."""
        return self._asked_at == now

    def due(self, session: ClientSession) -> float | None:
        """When to look again, if nothing happens."""
        stream = session.streaming
        return self._again_at if self.on and stream is not None and self._waits else None

    def _choose(self, remaining: int, now: float) -> None:
        """Whether the verifier is to wait for guesses from now on."""
        waits = self.measuring.controller.waits(remaining, now=self._waits)
        if waits != self._waits:
            self._waits, self._settled_at = waits, now + self.measuring.rtt.smoothed
            self.measuring.changes("device" if waits else "server", self._settled_at)

    def _lead(self) -> float:
        """Tokens that the server advances until a guess made now arrives."""
        return self.measuring.controller.rate * self.measuring.rtt.smoothed

    def _bunch(self, growth: GuessTreeGrower, fresh: Sequence[int]) -> bool:
        """Whether to send now rather than grow on."""
        if len(self._held) or not self._waits:
            return len(fresh) >= (_PLENTY if len(self._held) > _PLENTY else _BUNCH)
        best = max(fresh, key=lambda node: (growth.depths[node], growth.tree.scores[node]))
        return growth.depths[best] >= self.shape.depth or growth.likeliest_open < self.shape.min_score

    def _tell(self, session: ClientSession, tree: DraftTree, fresh: Sequence[int], now: float) -> Foresee | None:
        """The likeliest of these nodes, with the paths to them, as many as fit into a message."""
        most, kept = self.measuring.controller.max_nodes, {0}
        for node in sorted(fresh, key=tree.scores.__getitem__, reverse=True):
            path = [node]
            while tree.parents[path[-1]] not in kept:
                path.append(tree.parents[path[-1]])
            if len(kept) + len(path) <= most:
                kept.update(path)
        tells = self._waits if self._waits != self._told else None
        if len(kept) < 2 and tells is None:
            return None
        order = sorted(kept)
        index = {node: i for i, node in enumerate(order)}
        part = DraftTree(
            [tree.tokens[node] for node in order],
            [index.get(tree.parents[node], -1) for node in order],
            [tree.scores[node] for node in order],
        )
        message = session.foresee(part.tokens, part.parents, neg_log_probs_of(part), tells)
        self._told = self._waits
        if self._waits and not len(self._held) and now >= self._settled_at:
            self._asked_at = None if self._again else now  # of what was sent twice nobody knows which is answered
        self._held.add(session.log, message.base, message.tokens, message.parents, message.neg_log_probs)
        self._wait_again(now)
        return message

    def _wait_again(self, now: float) -> None:
        self._again_at = now + (2 * self.measuring.usual + _AGAIN_SECONDS) * 2**self._again
