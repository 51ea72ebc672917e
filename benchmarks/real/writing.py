"""Plain decoding of many prompts by a target of any kind, its batch kept full: no drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moa.grammar.matcher import Matcher
from moa.grammar.spec import Grammar
from moa.sampling import SamplingSettings
from moa.target.choosing import Judged, accept_rows
from moa.target.contract import Target
from moa.target.rows import Row
from moa.wire.finish import TurnRules, first_finish

_PIECE = 128
"""Tokens of a prompt in a forward."""


@dataclass(frozen=True)
class Task:
    """A prompt to be continued."""

    key: str
    ids: list[int]
    tokens: int
    """Most of the answer."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None


@dataclass
class _Writing:
    task: Task
    slot: int
    log: list[int]
    rules: TurnRules
    matcher: Matcher | None
    finish: str = ""


def write(
    target: Target, tasks: Iterable[Task], done: Callable[[Task, list[int], str], None]
) -> None:
    """Continue every prompt. `done` gets each answer, and why it ended, as soon as it has."""
    waiting = deque(tasks)
    active: list[_Writing] = []
    while waiting or active:
        while waiting and target.cache.free:
            active.append(_begin(target, waiting.popleft(), active))
        _advance(target, active)
        for one in [one for one in active if one.finish]:
            active.remove(one)
            target.cache.release(one.slot)
            done(one.task, one.log[len(one.task.ids) :], one.finish)


def _begin(target: Target, task: Task, active: Sequence[_Writing]) -> _Writing:
    slot = _with_prompt(target, task, active)
    rules = TurnRules(
        start=len(task.ids),
        max_new_tokens=task.tokens,
        max_context=target.cache.capacity,
        eos_ids=frozenset(target.facts.eos_ids),
        stop=task.stop,
    )
    matcher = None
    if task.grammar is not None:
        matcher = target.grammars.compile(task.grammar).matcher(len(task.ids))
    return _Writing(task, slot, list(task.ids), rules, matcher)


def _with_prompt(target: Target, task: Task, active: Sequence[_Writing]) -> int:
    """A slot that holds the prompt but for its last token: that of another temperature is shared."""
    length = len(task.ids) - 1
    for one in active:
        if one.task.ids == task.ids and length:
            return target.cache.share(one.slot, length)
    slot = target.cache.acquire()
    for start in range(0, length, _PIECE):
        piece = task.ids[start : min(start + _PIECE, length)]
        step = target.forward([Row.chain(slot, piece, judged="none")])
        target.commit(step, 0, range(len(piece)))
    return slot


def _advance(target: Target, active: list[_Writing]) -> None:
    """One token more of each."""
    step = target.forward([Row.chain(one.slot, one.log[-1:]) for one in active])
    judged = [_judged(one) for one in active]
    for row, (one, accepted) in enumerate(zip(active, accept_rows(step, judged), strict=True)):
        target.commit(step, row, [0])
        token = accepted.next_token
        _, one.finish = first_finish(
            one.rules, one.log, [token], lambda ids: str(target.tokenizer.decode(list(ids)))
        )
        one.log.append(token)


def _judged(one: _Writing) -> Judged:
    pending = one.log[-1:]
    if one.matcher is None:
        return Judged(pending, [-1], one.log, one.task.sampling)
    tokens, masks = one.matcher.after(one.log).judge(pending, [-1])
    return Judged(tokens, [-1], one.log, one.task.sampling, masks)
