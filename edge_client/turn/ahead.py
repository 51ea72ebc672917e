"""The streams of a turn, and the guesses for them. Pure.

All tokens come by a stream. What may come next goes up beside it as `Foresee`:

* text that is known already: what was written offline, or what the user predicts;
* guesses of the drafter, which grows a tree below the log's end.

Where the server drafts for itself, it has advanced by the tokens of a round trip when a guess
arrives: only guesses beyond those are useful. Where it waits for the device, the first guesses
after a miss are sent when they are deep enough (`Controller.first_guesses`). With `auto` the device
changes between the two as it learns how often it is right. Unless it guesses ahead, it sends
nothing while the verifier has guesses left.

`_sent` mirrors the guesses at the verifier. A verifier without progress may have lost them: then
all are sent again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_client.turn.actions import Grow
from edge_client.turn.controller import GUESSED, Controller, WhoDrafts
from edge_client.turn.deadlines import Deadlines, Moment
from edge_client.turn.stats import Stats
from edge_client.turn.transcript import Transcript
from moa.speculation.guess_tree import GuessTree, GuessTreeGrower, neg_log_probs_of
from moa.speculation.prediction import Prediction
from moa.tree import DraftTree
from moa.wire import Advanced
from moa.wire.messages import Foresee, Stream, Welcome

_LEAST_WAITING = 0.01
"""Least probability of a guess that is grown further, where the verifier waits for guesses."""
_LEAST_BESIDE = 0.1
"""The same where it drafts too."""
_SEND = 0.25
"""Share of that probability from which on a guess is sent."""
_MOST = 256
"""Nodes of the tree."""
_MOST_IN_A_MESSAGE = 63
"""Guesses of the drafter that are sent at once: more are rarely right."""
_FEW = 6
"""New nodes that are worth a message while the verifier still has others."""
_MANY = 16
"""The same while it has more than so many."""
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
    who_drafts: WhoDrafts = "auto"
    ahead: bool = True
    """Whether guesses go ahead of the answers; else the device guesses where the verifier waits
    for it and has no guess left."""
    prediction: Prediction | None = None
    takes_guesses: bool = False
    """Whether this verifier does."""
    reads: bool = False
    """Whether the drafter still reads the prompt: no guess can be in time before."""
    _answered_at: float | None = None
    """When the stream last brought tokens."""
    _sent: GuessTree = field(default_factory=GuessTree)
    _round: tuple[bytes, int] | None = None
    """The stream that they were sent for."""
    _waits: bool = False
    """Whether the verifier is to wait for guesses."""
    _waits_there: bool | None = False
    """The same, as the verifier has it; None: unknown, since the connection was lost."""
    _may_wait: bool = False
    """Whether it was ever asked to wait in this stream: if the last word about it is lost, it does."""
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
    _known: tuple[int, list[int]] = (-1, [])
    """Length of the log for which the prediction was last asked, and what it said."""

    @property
    def guesses(self) -> bool:
        """Whether the drafter guesses for this verifier."""
        if not self.takes_guesses:
            return False
        return self.who_drafts == "device" or (self.who_drafts == "auto" and self.ahead)

    def agreed(self, welcome: Welcome) -> None:
        """The features of this verifier."""
        self.takes_guesses = "foresee" in welcome.features

    def lost(self) -> None:
        """A new connection or session: the verifier may have no guesses any more, or still wait for
        them."""
        self._forget_guesses()
        if self._may_wait:
            self._waits_there = None

    def no_drafter(self) -> None:
        """The drafter has failed: no stream waits for it any more."""
        if self.who_drafts != "none":
            self.who_drafts = "server"

    def begin(self) -> Stream:
        """The stream to ask for. Where there is known text, it waits for that, which follows."""
        self._forget_guesses()
        self._answered_at = None
        self._waits = self.who_drafts == "device" and self.guesses
        self._waits_there = self._waits or (self.takes_guesses and bool(self._known_text()))
        self._may_wait = self._waits_there
        stream = self.transcript.session.stream(
            speculate=self.who_drafts != "none", waits=self._waits_there
        )
        self._round = (stream.session, stream.round)
        return stream

    def grew(self, action: Grow, tree: GuessTreeGrower) -> None:
        """The drafter has grown the tree."""
        self._tree = tree
        self._length = len(action.ids)

    # ---- what answers teach

    def answered(self, event: Advanced, now: float, *, prompt: bool = False) -> None:
        """A stream has answered; `prompt`: a prompt had to be read before."""
        self._measure(event, now, prompt=prompt)
        if not event.tokens:
            return
        if not self._waits and self.guesses and not self.reads:
            self.controller.usefulness.forward(bool(event.foreseen))
        predicted = self.prediction is not None and self.prediction.decided(event.tokens) > 0
        self._judge(event.tokens, predicted=predicted)
        # A forward over drafts of the server's own was begun before our guesses came.
        if self._asked_at is not None and not _drafted_there(event):
            self.controller.rtt.add(
                now - self._asked_at - (event.queue_ms + event.forward_ms) / 1000
            )
        self._asked_at = None
        self._again = 0
        self._sent.follow(self.transcript.session.log)
        self._expect(now)

    def _measure(self, event: Advanced, now: float, *, prompt: bool) -> None:
        """The pace of the stream, and the time of its forwards."""
        tokens = len(event.tokens)
        if tokens:
            # who waits for an answer waits in the queue, too
            waited = self._asked_at is not None and not prompt and not _drafted_there(event)
            milliseconds = event.forward_ms + (event.queue_ms if waited else 0.0)
            self.controller.ran(1 + event.drafted, milliseconds / 1000)
        server_drafts = self.who_drafts != "none" and not self._waits
        before = self._answered_at
        if server_drafts and tokens and before is not None and before >= self._changed_at:
            self.controller.streamed(tokens, now - before)
        self._answered_at = now
        if event.foreseen:
            self.stats.rounds += 1
            self.stats.accepted += tokens - 1
            self.stats.drafted += event.foreseen
        if tokens:
            self.stats.by[
                "device" if event.foreseen else "server" if event.drafted else "none"
            ] += tokens

    def _judge(self, tokens: Sequence[int], *, predicted: bool) -> None:
        """How many guesses in a row were right; those of a predicted text say nothing about the
        drafter's."""
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
        if run is not None and self.guesses and not predicted:
            self.controller.streak.add(*run)

    # ---- what to do while the stream runs

    def next(self, moment: Moment) -> Foresee | Grow | None:
        """The most useful action for the running stream, if any."""
        stream = self.transcript.session.streaming
        if not self.takes_guesses or stream is None:
            return None
        now = moment.now
        self._follow(stream, now)
        if self._waits and moment.reached(self._again_at):
            self._forget_sent()
            self._again = min(self._again + 1, _MOST_AGAIN)
            self._expect(now)
            moment.reached(self._again_at)
        self._sent.follow(self.transcript.session.log)
        if known := self._known_text():
            return self._send_known(known, now)
        if self._waits_there != self._waits:
            pending = self.transcript.session.log[-1]
            return self._send(DraftTree([pending], [-1], [0.0]), (), 0, now)
        if not self._guesses_now():
            return None
        return self._send_grown(now)

    def _follow(self, stream: Stream, now: float) -> None:
        """Which stream it is, and whether the verifier is to wait for guesses from now on."""
        if self._round != (stream.session, stream.round):
            self._forget_guesses()
            self._round = (stream.session, stream.round)
            self._expect(now)
        waits = self.who_drafts == "device" and self.guesses
        if self.who_drafts == "auto" and self.guesses:
            # Before the drafter has its first guesses, waiting for it would stop the stream.
            has_guessed = self._tree is not None
            remaining = self.transcript.remaining
            waits = has_guessed and self.controller.waits(remaining, now=self._waits)
        if waits != self._waits:
            self._waits = waits
            self._changed_at = now + self.controller.rtt.smoothed

    def _guesses_now(self) -> bool:
        """Whether the drafter has something to do."""
        if not self.guesses:
            return False
        if self._waits:
            return self.ahead or not len(self._sent)
        return not self.controller.usefulness.rests

    def _known_text(self) -> list[int]:
        """Text that is known to follow the log, or predicted to."""
        if self.transcript.provisional:
            return self.transcript.provisional
        if self.prediction is None:
            return []
        log = self.transcript.session.log
        length, known = self._known
        if length != len(log):
            most = min(self.controller.most_guesses, self.transcript.remaining)
            known = self.prediction.after(self.transcript.output, most)
            self._known = len(log), known
        return known

    def _send_known(self, known: Sequence[int], now: float) -> Foresee | None:
        """Text that is known, as a chain of sure guesses; what was sent already, only with much
        more."""
        session = self.transcript.session
        tokens = [session.log[-1], *known[: self.controller.most_guesses]]
        chain = DraftTree(tokens, list(range(-1, len(tokens) - 1)), [0.0] * len(tokens))
        missing = self._sent.missing(chain)
        enough = len(missing) >= _MANY or len(missing) == len(tokens) - 1
        most = self.controller.most_guesses
        sent = self._send(chain, missing if enough else (), most, now)
        if sent is not None and enough and self.prediction and not self.transcript.provisional:
            self.prediction.told = tokens[1:]
        return sent

    def _send_grown(self, now: float) -> Foresee | Grow | None:
        """What the drafter guesses, or the next step of its tree."""
        session = self.transcript.session
        least = _LEAST_WAITING if self._waits else _LEAST_BESIDE
        grow = Grow(session.log, GUESSED, math.log(_SEND * least))
        tree = self._tree
        if tree is None or self._length != len(session.log) or tree.root != session.log[-1]:
            return grow
        done = len(tree.tree) >= _MOST or tree.likeliest_open < math.log(least)
        fresh = self._fresh(tree, least, done=done)
        if fresh and (done or self._enough(tree, fresh)):
            most = min(_MOST_IN_A_MESSAGE, self.controller.most_guesses)
            return self._send(tree.tree, fresh, most, now)
        return None if done else grow

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
        first = self.controller.first_guesses(self.transcript.remaining)
        best = max(fresh, key=lambda node: (tree.depths[node], tree.tree.scores[node]))
        return tree.depths[best] >= first.depth or tree.likeliest_open < first.least

    def _send(self, tree: DraftTree, fresh: Sequence[int], most: int, now: float) -> Foresee | None:
        """The likeliest of these nodes, at most so many with the paths to them; and whether the
        verifier is to wait, if it does not know."""
        waits = self._waits if self._waits != self._waits_there else None
        part = _likeliest(tree, fresh, most)
        if len(part) < 2 and waits is None:
            return None
        session = self.transcript.session
        message = session.foresee(part.tokens, part.parents, neg_log_probs_of(part), waits)
        self._waits_there = self._waits
        self._may_wait |= self._waits
        if self._waits and not len(self._sent) and now >= self._changed_at:
            self._asked_at = (
                None  # of guesses that were sent again it is unknown which message is answered
            )
            if not self._again:
                self._asked_at = now
                self.deadlines.asked(now)
                # the first guesses of a stream are a part of the request for it
                self.stats.calls += self._answered_at is not None
        self._sent.add(
            session.log, message.base, message.tokens, message.parents, message.neg_log_probs
        )
        self.stats.guess_messages += 1
        self._expect(now)
        return message

    def _forget_guesses(self) -> None:
        """None is held anywhere."""
        self._forget_sent()
        self._round = None
        self._tree = None
        self._asked_at = None

    def _forget_sent(self) -> None:
        self._sent.clear()
        if self.prediction is not None:
            self.prediction.told = []

    def _expect(self, now: float) -> None:
        """An answer is expected, or guesses were lost."""
        self._again_at = now + (2 * self.deadlines.usual + _AGAIN_SECONDS) * 2**self._again


def _drafted_there(event: Advanced) -> bool:
    """Whether the server has drafted for these tokens itself."""
    return event.drafted > 0 and not event.foreseen


def _likeliest(tree: DraftTree, nodes: Sequence[int], most: int) -> DraftTree:
    """The likeliest of these nodes with the paths to them, at most so many beside the root."""
    kept = {0}
    for node in sorted(nodes, key=tree.scores.__getitem__, reverse=True):
        path = [node]
        while tree.parents[path[-1]] not in kept:
            path.append(tree.parents[path[-1]])
        if len(kept) + len(path) <= most + 1:
            kept.update(path)
    order = sorted(kept)
    index = {node: i for i, node in enumerate(order)}
    return DraftTree(
        [tree.tokens[node] for node in order],
        [index.get(tree.parents[node], -1) for node in order],
        [tree.scores[node] for node in order],
    )
