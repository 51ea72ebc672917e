"""A turn as a stream, with guesses sent ahead of the answers. Pure.

The drafter grows a tree below the log's end while the device waits anyway. What is new of it,
likely, and can still be there in time goes up as `Foresee`. If the server drafts too, it has
advanced by the tokens of a round trip by then: only guesses beyond those are useful. If it does
not, it waits for ours, and the first draft after a miss is sent when it is as deep as a round's.
With `chooses` the device changes between the two as it learns how often it is right.

`_sent` mirrors the guesses at the verifier. A verifier without progress may have lost them: then
all are sent again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_client.turn.actions import Grow
from edge_client.turn.controller import GUESSED, Controller, Plan
from edge_client.turn.deadlines import Deadlines, Moment
from edge_client.turn.stats import Stats
from edge_client.turn.transcript import Transcript
from moa.speculation.guess_tree import GuessTree, GuessTreeGrower, neg_log_probs_of
from moa.tree import DraftTree, TreeShape
from moa.wire import Advanced
from moa.wire.messages import Foresee, Stream, Welcome

_LEAST_WAITING, _LEAST_BESIDE = 0.01, 0.1
"""Least probability of a guess that is grown further: where the verifier waits for guesses; where
it drafts too."""
_SEND = 0.25
"""Share of that probability from which on a guess is sent."""
_MOST = 256
"""Nodes of the tree."""
_FEW, _MANY = 6, 16
"""New nodes that are worth a message, while the verifier still has others; and where it has many."""
_AGAIN_SECONDS = 0.5
"""Wait beyond twice the usual time for an answer, after which guesses count as lost. Doubled every
time."""
_MOST_AGAIN = 4


@dataclass
class Ahead:
    """The streams of one turn, and the guesses for them."""

    transcript: Transcript
    controller: Controller
    deadlines: Deadlines
    stats: Stats
    wanted: bool = True
    """Whether the user and the budget allow guesses."""
    chooses: bool = False
    """Whether the server may draft, so that the device chooses when the verifier waits."""
    _agreed: bool = False
    _shape: TreeShape = field(default_factory=lambda: TreeShape.chain(4))
    """Of the draft that a round of the device would have."""
    _server_drafts: bool = True
    _answered_at: float | None = None
    """When the stream last brought tokens."""
    _sent: GuessTree = field(default_factory=GuessTree)
    _round: tuple[bytes, int] | None = None
    """The stream that they were sent for."""
    _waits: bool = False
    """Whether the verifier is to wait for guesses."""
    _waits_there: bool | None = False
    """The same, as the verifier has it; None: unknown, since the connection was lost."""
    _changed_at: float = 0.0
    """Until then answers may be from before the latest change of that."""
    _tree: GuessTreeGrower | None = None
    _length: int = 0
    """Length of the log that the tree was grown for."""
    _again_at: float = math.inf
    _again: int = 0
    """How often everything was sent again since the last token."""
    _asked_at: float | None = None
    """When guesses went to a verifier that waits and has none: the next tokens are their answer."""

    @property
    def on(self) -> bool:
        """Whether this verifier supports guesses for streams."""
        return self.wanted and self._agreed

    def agreed(self, welcome: Welcome) -> None:
        """The features of this verifier."""
        self._agreed = {"foresee", "stream"} <= set(welcome.features)

    def lost(self) -> None:
        """A new connection or session: the verifier may have no guesses any more, or still wait for
        them."""
        self._sent.clear()
        self._round = None
        self._waits_there = None
        self._tree = None
        self._asked_at = None

    def begin(self, plan: Plan) -> Stream:
        """The stream to ask for."""
        self._shape = plan.shape
        self._answered_at = None
        self._server_drafts = plan.who_drafts == "server"
        self._waits_there = plan.who_drafts == "device"
        return self.transcript.session.stream(
            speculate=self._server_drafts, waits=self._waits_there
        )

    def grew(self, action: Grow, tree: GuessTreeGrower) -> None:
        """The drafter has grown the tree."""
        self._tree = tree
        self._length = len(action.ids)

    # ---- what answers teach

    def answered(self, event: Advanced, now: float) -> None:
        """A stream has answered."""
        self._measure(event, now)
        if not event.tokens:
            return
        if not self._waits and self.on:
            self.controller.usefulness.forward(bool(event.foreseen))
        self._judge(event.tokens)
        if self._asked_at is not None:
            self.controller.rtt.add(
                now - self._asked_at - (event.queue_ms + event.forward_ms) / 1000
            )
            self._asked_at = None
        self._again = 0
        self._sent.follow(self.transcript.session.log)
        self._expect(now)

    def _measure(self, event: Advanced, now: float) -> None:
        """The pace of the stream."""
        tokens = len(event.tokens)
        if self._answered_at is not None and tokens and self._answered_at >= self._changed_at:
            self.controller.streamed(
                tokens,
                now - self._answered_at,
                drafts="server" if self._server_drafts else "none",
                server_seconds=event.forward_ms / 1000,
            )
        self._answered_at = now
        if event.foreseen:
            self.stats.rounds += 1
            self.stats.accepted += tokens - 1
            self.stats.drafted += event.foreseen
        if tokens:
            self.stats.by[
                "device" if event.foreseen else "server" if event.drafted else "none"
            ] += tokens

    def _judge(self, tokens: Sequence[int]) -> None:
        """How many guesses in a row were right."""
        run: tuple[int, bool] | None = None
        if self._tree is not None and self._length == len(self.transcript.session.log) - len(
            tokens
        ):
            run = self._tree.won(tokens)
            self.controller.guessed(*run)
        if self._round is not None:
            outcome = self._sent.judge(tokens)
            self.stats.outcomes[outcome] += 1
            if (
                self._waits and self._waits_there
            ):  # a verifier that waits stands still where guesses end
                ended = outcome in ("missed", "beyond")
                run = len(tokens) - ended, ended
        if run is not None:
            self.controller.streak.add(*run)

    # ---- what to do while the stream runs

    def next(self, moment: Moment) -> Foresee | Grow | None:
        """The most useful action for the running stream, if any."""
        session, stream, now = (
            self.transcript.session,
            self.transcript.session.streaming,
            moment.now,
        )
        if not self.on or stream is None:
            return None
        if self._round != (session.id, stream.round):
            there = self._waits_there
            self.lost()
            self._round = (session.id, stream.round)
            self._waits = stream.waits
            self._waits_there = there
            self._expect(now)
        if self.chooses:
            self._choose(now)
            if self._waits_there != self._waits and (
                self._waits_there is not False or len(self._sent)
            ):
                return self._send(DraftTree([session.log[-1]], [-1], [0.0]), (), now)
        if not self._waits and self.controller.usefulness.rests:
            return None
        if self._waits and moment.reached(self._again_at):
            self._sent.clear()
            self._again = min(self._again + 1, _MOST_AGAIN)
            self._expect(now)
            moment.reached(self._again_at)
        self._sent.follow(session.log)
        if (
            provisional := self.transcript.provisional
        ):  # it is what the device would guess, and it must be checked
            tokens = [session.log[-1], *provisional[: self.controller.max_nodes]]
            chain = DraftTree(tokens, list(range(-1, len(tokens) - 1)), [0.0] * len(tokens))
            return self._send(chain, self._sent.missing(chain), now)
        least = _LEAST_WAITING if self._waits else _LEAST_BESIDE
        grow = Grow(session.log, GUESSED, math.log(_SEND * least))
        tree = self._tree
        if tree is None or self._length != len(session.log) or tree.root != session.log[-1]:
            return grow
        done = len(tree.tree) >= _MOST or tree.likeliest_open < math.log(least)
        fresh = self._fresh(tree, least, done=done)
        if fresh and (done or self._enough(tree, fresh)):
            return self._send(tree.tree, fresh, now)
        return None if done else grow

    def _choose(self, now: float) -> None:
        """Whether the verifier is to wait for guesses from now on."""
        waits = self.controller.waits(self.transcript.remaining, now=self._waits)
        if waits != self._waits:
            self._waits = waits
            self._server_drafts = not waits
            self._changed_at = now + self.controller.rtt.smoothed

    def _fresh(self, tree: GuessTreeGrower, least: float, *, done: bool) -> list[int]:
        """The guesses to send: new, likely, and there in time."""
        missing = self._sent.missing(tree.tree)
        scores = tree.tree.scores
        # A server that drafts advances until they arrive.
        lead = 0.0 if self._waits else self.controller.rate * self.controller.rtt.smoothed
        fresh = [
            node
            for node in missing
            if tree.depths[node] > lead and scores[node] >= math.log(_SEND * least)
        ]
        if (
            done and not fresh and self._waits and not len(self._sent)
        ):  # the verifier stands still: any guess will do
            fresh = sorted(missing, key=scores.__getitem__)[-1:]
        return fresh

    def _enough(self, tree: GuessTreeGrower, fresh: Sequence[int]) -> bool:
        """Whether to send now rather than grow on."""
        if len(self._sent) or not self._waits:
            return len(fresh) >= (_MANY if len(self._sent) > _MANY else _FEW)
        best = max(fresh, key=lambda node: (tree.depths[node], tree.tree.scores[node]))
        return tree.depths[best] >= self._shape.depth or tree.likeliest_open < self._shape.min_score

    def _send(self, tree: DraftTree, fresh: Sequence[int], now: float) -> Foresee | None:
        """The likeliest of these nodes, with the paths to them, as many as fit into a message."""
        most = self.controller.max_nodes
        kept = {0}
        for node in sorted(fresh, key=tree.scores.__getitem__, reverse=True):
            path = [node]
            while tree.parents[path[-1]] not in kept:
                path.append(tree.parents[path[-1]])
            if len(kept) + len(path) <= most:
                kept.update(path)
        waits = self._waits if self._waits != self._waits_there else None
        if len(kept) < 2 and waits is None:
            return None
        session = self.transcript.session
        order = sorted(kept)
        index = {node: i for i, node in enumerate(order)}
        part = DraftTree(
            [tree.tokens[node] for node in order],
            [index.get(tree.parents[node], -1) for node in order],
            [tree.scores[node] for node in order],
        )
        message = session.foresee(part.tokens, part.parents, neg_log_probs_of(part), waits)
        self._waits_there = self._waits
        if self._waits and not len(self._sent) and now >= self._changed_at:
            self._asked_at = (
                None  # of guesses that were sent again it is unknown which message is answered
            )
            if not self._again:
                self._asked_at = now
                self.deadlines.asked(now)
        self._sent.add(
            session.log, message.base, message.tokens, message.parents, message.neg_log_probs
        )
        self.stats.guess_messages += 1
        self._expect(now)
        return message

    def _expect(self, now: float) -> None:
        """An answer is expected, or guesses were lost."""
        self._again_at = now + (2 * self.deadlines.usual + _AGAIN_SECONDS) * 2**self._again
