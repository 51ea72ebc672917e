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
from typing import NamedTuple

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
"""Least probability of a guess that is grown further, where the verifier drafts too."""
_SEND = 0.25
"""A guess is sent if it has this share of that probability: it is worth its bytes, but no step."""
_MOST = 256
"""Nodes of the tree at most."""
_MOST_IN_A_MESSAGE = 63
"""Guesses of the drafter that are sent at once: more are rarely right."""
_FEW = 6
"""New nodes that are worth a message while the verifier still has others."""
_MANY = 16
"""New nodes that are worth a message while the verifier has more than so many."""
_AGAIN_SECONDS = 0.5
"""Seconds beyond twice the usual time for an answer, after which guesses count as lost. Doubled
every time."""
_MOST_AGAIN = 4
"""It is doubled at most so many times."""


class _Row(NamedTuple):
    """A row of guesses, as new tokens have judged it."""

    right: int
    """The guesses from the first one on that are right."""
    ends_wrong: bool
    """Whether a wrong guess comes behind them; else the row goes on behind the new tokens, or there
    is no guess."""


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
    """Whether this verifier takes guesses."""
    reads: bool = False
    """Whether the drafter still reads the prompt: no guess can be in time before."""
    rests: bool = False
    """Whether no guess is of use now, because the user's rate at the verifier is used up."""
    _answered_at: float | None = None
    """When the stream last brought tokens."""
    _sent: GuessTree = field(default_factory=GuessTree)
    """The guesses that the verifier has."""
    _round: tuple[bytes, int] | None = None
    """Session and number of the stream that they were sent for."""
    _should_wait: bool = False
    """Whether the verifier is to wait for guesses."""
    _told_to_wait: bool | None = False
    """Whether the verifier was told to; None: that may have been lost with a connection."""
    _may_wait: bool = False
    """Whether it was ever told to in this stream: if the last word about it is lost, it may wait."""
    _changed_at: float = 0.0
    """Until then answers may be from before the latest change of that."""
    _tree: GuessTreeGrower | None = None
    """The tree that the drafter grows."""
    _length: int = 0
    """Length of the log that the tree was grown for."""
    _resend_at: float = math.inf
    """When guesses count as lost."""
    _resent: int = 0
    """How often everything was sent again since the last token."""
    _asked_at: float | None = None
    """When guesses went to a verifier that waits and has none: the next tokens are their answer."""
    _known: tuple[int, list[int]] = (-1, [])
    """Length of the log for which the prediction was last asked, and what it said."""

    @property
    def guesses(self) -> bool:
        """Whether the drafter guesses for this verifier."""
        if not self.takes_guesses or self.rests:
            return False
        return self.who_drafts == "device" or (self.who_drafts == "auto" and self.ahead)

    def agreed(self, welcome: Welcome) -> None:
        """Learn the features of this verifier."""
        self.takes_guesses = "foresee" in welcome.features

    def lost(self) -> None:
        """Take it that the verifier has no guesses any more, because the connection or the session
        is a new one. A stream that it goes on with may still wait for some."""
        self._forget_guesses()
        if self._may_wait:
            self._told_to_wait = None

    def no_drafter(self) -> None:
        """Note that the drafter has failed: no stream waits for it any more."""
        if self.who_drafts != "none":
            self.who_drafts = "server"

    def begin(self) -> Stream:
        """Returns the request for a stream, in which the verifier decodes until the answer ends.
        Where the device already has text to be checked (written offline, or predicted), the
        verifier is to wait for it, and it is sent right behind."""
        self._forget_guesses()
        self._answered_at = None
        self._should_wait = self.who_drafts == "device" and self.guesses
        self._told_to_wait = self._should_wait or (self.takes_guesses and bool(self._known_text()))
        self._may_wait = self._told_to_wait
        stream = self.transcript.session.stream(
            speculate=self.who_drafts != "none", waits=self._told_to_wait
        )
        self._round = (stream.session, stream.round)
        return stream

    def grew(self, action: Grow, tree: GuessTreeGrower) -> None:
        """Take over the tree of guesses that the drafter has grown for this action."""
        self._tree = tree
        self._length = len(action.ids)

    # ---- what answers teach

    def answered(self, event: Advanced, now: float, *, prompt: bool = False) -> None:
        """Learn from an answer of the stream how fast it is, how often the guesses were right, and
        how long a round trip takes. `prompt` says that the verifier had to read a prompt before it
        answered."""
        previous_at = self._answered_at
        self._answered_at = now
        if not event.tokens:
            return
        self._measure_forward(event, prompt=prompt)
        if previous_at is not None:
            self._measure_stream(event, previous_at, now)
        self._measure_round_trip(event, now)
        self._count(event)
        self._judge(event)
        self._resent = 0
        self._sent.follow(self.transcript.session.log)
        self._expect(now)

    def _measure_forward(self, event: Advanced, *, prompt: bool) -> None:
        """Measure how long a forward of the target takes."""
        seconds = event.forward_ms / 1000
        if self._asked_at is not None and not prompt and not _drafted_there(event):
            # Whoever waits for an answer waits in the queue, too.
            seconds = server_seconds(event)
        self.controller.ran(1 + event.drafted, seconds)

    def _measure_stream(self, event: Advanced, previous_at: float, now: float) -> None:
        """Measure how many tokens a second a stream brings for which the server drafts, from the
        time since the answer before this one."""
        if self.who_drafts == "none" or self._should_wait:
            return  # the server does not draft
        if previous_at >= self._changed_at:  # else that answer may be of the other way of drafting
            self.controller.streamed(len(event.tokens), now - previous_at)

    def _measure_round_trip(self, event: Advanced, now: float) -> None:
        """Measure a round trip, if the verifier stood still until our guesses came: from their
        sending to this answer, without the time that the server worked."""
        asked_at = self._asked_at
        self._asked_at = None
        # A forward over the server's own drafts was begun before our guesses came.
        if asked_at is not None and not _drafted_there(event):
            self.controller.rtt.add(now - asked_at - server_seconds(event))

    def _count(self, event: Advanced) -> None:
        """Count the new tokens for the turn's figures, by who drafted them."""
        tokens = len(event.tokens)
        self.stats.by[_who_drafted(event)] += tokens
        if event.foreseen:
            self.stats.rounds += 1
            self.stats.accepted += tokens - 1  # the last token is the target's own
            self.stats.drafted += event.foreseen

    def _judge(self, event: Advanced) -> None:
        """Compare the new tokens with the guesses at them, and learn how often guesses are of use
        and how many in a row are right."""
        if not self._should_wait and self.guesses and not self.reads:
            self.controller.usefulness.forward(bool(event.foreseen))
        predicted = self.prediction is not None and self.prediction.decided(event.tokens) > 0
        self._judge_row(event.tokens, predicted=predicted)

    def _judge_row(self, tokens: Sequence[int], *, predicted: bool) -> None:
        """Learn how many guesses in a row are right. `predicted`: the tokens were in the text that
        the user expects; they say nothing about how well the drafter guesses."""
        row = self._row_of_tree(tokens)
        if self._round is not None:
            outcome = self._sent.judge(tokens)
            self.stats.outcomes[outcome] += 1
            if self._should_wait and self._told_to_wait:
                # A verifier that waits stands still where guesses end: all its tokens but the last
                # were guessed.
                ends_wrong = outcome in ("missed", "beyond")
                row = _Row(len(tokens) - 1 if ends_wrong else len(tokens), ends_wrong)
        if row is not None and self.guesses and not predicted:
            self.controller.streak.add(row.right, row.ends_wrong)

    def _row_of_tree(self, tokens: Sequence[int]) -> _Row | None:
        """Returns how the guesses in the drafter's tree have done at these new tokens, and teaches
        it to the controller; None if the tree does not begin where they do."""
        length_before = len(self.transcript.session.log) - len(tokens)
        if self._tree is None or self._length != length_before:
            return None
        row = _Row(*self._tree.won(tokens))
        self.controller.guessed(row.right, row.ends_wrong)
        return row

    # ---- what to do while the stream runs

    def next(self, moment: Moment) -> Foresee | Grow | None:
        """Returns what helps the running stream most: guesses to send, or a step of the drafter
        that grows more of them. None if nothing does now."""
        stream = self.transcript.session.streaming
        if not self.takes_guesses or stream is None:
            return None
        now = moment.now
        self._follow(stream, now)
        if self._should_wait:
            self._send_lost_again(moment)
        self._sent.follow(self.transcript.session.log)
        known = self._known_text()
        if known:
            return self._send_known(known, now)
        if self._told_to_wait != self._should_wait:
            return self._send_whether_to_wait(now)
        if not self._guesses_now():
            return None
        return self._send_grown(now)

    def _follow(self, stream: Stream, now: float) -> None:
        """Note which stream runs, and decide whether the verifier is to wait for the device's
        guesses from now on or to draft for itself."""
        if self._round != (stream.session, stream.round):
            self._forget_guesses()
            self._round = (stream.session, stream.round)
            self._expect(now)
        waits = self._waiting_pays()
        if waits != self._should_wait:
            self._should_wait = waits
            # Half a round trip until the verifier hears of it, another for its next answer.
            self._changed_at = now + self.controller.rtt.smoothed

    def _waiting_pays(self) -> bool:
        """Whether the verifier should wait for the device's guesses rather than draft for itself."""
        if not self.guesses:
            return False
        if self.who_drafts == "device":
            return True
        if self._tree is None:
            return False  # the drafter has no guesses yet: waiting for it would stop the stream
        return self.controller.waits(self.transcript.remaining, waits_already=self._should_wait)

    def _send_lost_again(self, moment: Moment) -> None:
        """Forget the guesses that were sent to a verifier that waits, if it has not answered them
        for long: they count as lost, and are sent again as if they were new."""
        if not moment.reached(self._resend_at):
            return
        self._forget_sent()
        self._resent = min(self._resent + 1, _MOST_AGAIN)
        self._expect(moment.now)
        moment.reached(self._resend_at)  # the turn looks again then, at the latest

    def _guesses_now(self) -> bool:
        """Whether the drafter is to guess for the stream now."""
        if not self.guesses:
            return False
        if self._should_wait:
            return self.ahead or not len(self._sent)
        return not self.controller.usefulness.rests

    def _known_text(self) -> list[int]:
        """Returns tokens that are expected after the log without asking the drafter: text that was
        written offline, or else what the user's prediction says."""
        if self.transcript.provisional:
            return self.transcript.provisional
        if self.prediction is None:
            return []
        log = self.transcript.session.log
        length, known = self._known
        if length != len(log):  # the log has grown since the prediction was last asked
            most = min(self.controller.most_guesses, self.transcript.remaining)
            known = self.prediction.after(self.transcript.output, most)
            self._known = len(log), known
        return known

    def _send_known(self, known: Sequence[int], now: float) -> Foresee | None:
        """Returns a message with tokens that are expected after the log, one after another, each as
        a sure guess. Until the verifier lacks many of them it is sent none, only whether it is to
        wait; None if it knows that, too."""
        most = self.controller.most_guesses
        tokens = [self.transcript.session.log[-1], *known[:most]]
        chain = DraftTree(tokens, list(range(-1, len(tokens) - 1)), [0.0] * len(tokens))
        missing = self._sent.missing(chain)
        has_none_of_it = len(missing) == len(tokens) - 1
        if not has_none_of_it and len(missing) < _MANY:
            return self._send_whether_to_wait(now)
        message = self._send(chain, missing, most, now)
        if message is not None and self.prediction is not None and not self.transcript.provisional:
            self.prediction.told = tokens[1:]
        return message

    def _send_whether_to_wait(self, now: float) -> Foresee | None:
        """Returns a message without a guess that tells the verifier whether it is to wait for
        guesses; None if it knows that."""
        pending = self.transcript.session.log[-1]
        return self._send(DraftTree([pending], [-1], [0.0]), (), 0, now)

    def _send_grown(self, now: float) -> Foresee | Grow | None:
        """Returns a message with guesses from the drafter's tree, or the next step that grows the
        tree. None if the tree is complete and all of it was sent."""
        # A guess of less than this probability is not guessed on from.
        least = _LEAST_WAITING if self._should_wait else _LEAST_BESIDE
        grow = Grow(self.transcript.session.log, GUESSED, math.log(_SEND * least))
        tree = self._tree_of_log()
        if tree is None:
            return grow
        complete = len(tree.tree) >= _MOST or tree.likeliest_open < math.log(least)
        nodes = self._worth_sending(tree, least, complete=complete)
        if nodes and (complete or self._send_now(tree, nodes)):
            most = min(_MOST_IN_A_MESSAGE, self.controller.most_guesses)
            return self._send(tree.tree, nodes, most, now)
        return None if complete else grow

    def _tree_of_log(self) -> GuessTreeGrower | None:
        """The tree that the drafter has grown, if it grows from the end of the log as it is now."""
        tree = self._tree
        log = self.transcript.session.log
        if tree is None or self._length != len(log) or tree.root != log[-1]:
            return None
        return tree

    def _worth_sending(self, tree: GuessTreeGrower, least: float, *, complete: bool) -> list[int]:
        """Returns the nodes of the drafter's tree that are worth their bytes: those that the
        verifier does not have, that are likely enough, and that arrive before it has decoded past
        them. Each node is a guessed token, `least` the probability below which none is grown
        further."""
        missing = self._sent.missing(tree.tree)
        scores = tree.tree.scores
        lead = 0.0
        if not self._should_wait:
            # A server that drafts has decoded so many more tokens when the guesses arrive.
            lead = self.controller.rate * self.controller.rtt.smoothed
        least_score = math.log(_SEND * least)
        nodes = []
        for node in missing:
            if tree.depths[node] > lead and scores[node] >= least_score:
                nodes.append(node)
        if complete and self._stands_still and not nodes:
            # Without a guess the verifier would wait for ever: the likeliest one, however unlikely.
            nodes = sorted(missing, key=scores.__getitem__)[-1:]
        return nodes

    def _send_now(self, tree: GuessTreeGrower, nodes: Sequence[int]) -> bool:
        """Whether to send these guesses now rather than grow the tree further: enough of them for a
        message, or, where the verifier stands still without any, deep enough to be worth its
        wait."""
        if not self._stands_still:
            return len(nodes) >= (_MANY if len(self._sent) > _MANY else _FEW)
        first = self.controller.first_guesses(self.transcript.remaining)
        deepest = max(tree.depths[node] for node in nodes)
        return deepest >= first.depth or tree.likeliest_open < first.least

    @property
    def _stands_still(self) -> bool:
        """Whether the verifier waits for guesses and has none left: it decodes nothing now."""
        return self._should_wait and not len(self._sent)

    def _send(self, tree: DraftTree, nodes: Sequence[int], most: int, now: float) -> Foresee | None:
        """Returns a message with the likeliest of these nodes and the paths to them, `most` in all,
        and, where that has changed, with whether the verifier is to wait for guesses. None if there
        is nothing to say."""
        waits = self._should_wait if self._should_wait != self._told_to_wait else None
        part = _likeliest(tree, nodes, most)
        has_guesses = len(part) > 1  # beside the pending token
        if not has_guesses and waits is None:
            return None
        session = self.transcript.session
        # A message that changes nothing about the waiting leaves it out.
        message = session.foresee(part.tokens, part.parents, neg_log_probs_of(part), waits)
        self._told_to_wait = self._should_wait
        self._may_wait |= self._should_wait
        if self._stands_still and now >= self._changed_at:
            self._note_request(now)
        self._sent.add(
            session.log, message.base, message.tokens, message.parents, message.neg_log_probs
        )
        self.stats.guess_messages += 1
        self._expect(now)
        return message

    def _note_request(self, now: float) -> None:
        """Note that these guesses are a request: the verifier stands still until they arrive, so
        its next tokens are the answer to them, and measure a round trip."""
        if self._resent:
            # Sent again, they are the same request: it was counted, and its answer is as late as it
            # was. Which of the messages is answered is unknown, so no round trip is measured.
            self._asked_at = None
            return
        self._asked_at = now
        self.deadlines.asked(now)
        if self._answered_at is not None:
            self.stats.calls += 1  # before any answer they belong to the request for the stream

    def _forget_guesses(self) -> None:
        """Forget all guesses, those of the drafter and those at the verifier."""
        self._forget_sent()
        self._round = None
        self._tree = None
        self._asked_at = None

    def _forget_sent(self) -> None:
        """Take it that the verifier has no guesses."""
        self._sent.clear()
        if self.prediction is not None:
            self.prediction.told = []

    def _expect(self, now: float) -> None:
        """Expect an answer; if none comes for long, guesses were lost."""
        patience = (2 * self.deadlines.usual + _AGAIN_SECONDS) * 2**self._resent
        self._resend_at = now + patience


def server_seconds(event: Advanced) -> float:
    """How long the server took for this answer, in its queue and in the forward."""
    return (event.queue_ms + event.forward_ms) / 1000


def _who_drafted(event: Advanced) -> str:
    """Who drafted the forward that brought these tokens."""
    if event.foreseen:
        return "device"
    return "server" if event.drafted else "none"


def _drafted_there(event: Advanced) -> bool:
    """Whether the server has drafted for these tokens itself."""
    return event.drafted > 0 and not event.foreseen


def _likeliest(tree: DraftTree, nodes: Sequence[int], most: int) -> DraftTree:
    """Returns the part of a tree of guesses that has the likeliest of these nodes and all nodes on
    the paths to them: at most `most` nodes beside the root."""
    kept = {0}
    for node in sorted(nodes, key=tree.scores.__getitem__, reverse=True):
        path = [node]
        while tree.parents[path[-1]] not in kept:
            path.append(tree.parents[path[-1]])
        if len(kept) + len(path) <= most + 1:  # a node without its whole path says nothing
            kept.update(path)
    nodes_kept = sorted(kept)
    new_index = {node: index for index, node in enumerate(nodes_kept)}
    return DraftTree(
        [tree.tokens[node] for node in nodes_kept],
        [new_index.get(tree.parents[node], -1) for node in nodes_kept],
        [tree.scores[node] for node in nodes_kept],
    )
