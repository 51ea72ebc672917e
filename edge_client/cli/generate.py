"""`edge-client generate`: one prompt, one answer."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from edge_client.cli import options
from edge_client.events import (
    OVERDUE,
    AnswerSoFar,
    Done,
    Event,
    Link,
    Progress,
    Prompt,
    Token,
)
from edge_client.screen.pipe import PipeView, View, how_much_verified, refused
from edge_client.screen.views import make_view
from edge_client.screen.words import toy, whose_tokens
from edge_client.settings import ClientSettings
from moa.cli.command_line import add_flags
from moa.errors import MoaError, UsageError


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = (
        "Answer one prompt. Exit code 0 also where nobody could be reached to verify it, 1 where the "
        "verifier or the upstream refuses."
    )
    options.add_prompt(command)
    command.add_argument("--system", metavar="TEXT", help="system message for the assistant")
    how = command.add_mutually_exclusive_group()
    how.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object with ids, statuses, events and figures",
    )
    how.add_argument(
        "--jsonl",
        action="store_true",
        help="print every event as a JSON object on a line, as it happens",
    )
    how.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="only the text: no status line, figures or notices",
    )
    add_flags(command, ClientSettings, {"logprobs": "N"})
    command.add_argument(
        "--require-verified",
        action="store_true",
        help="exit code 1 unless the target has verified every token",
    )
    options.add_connection(command)
    options.add_generation(command)
    options.add_structure(command)


def run(arguments: argparse.Namespace) -> int:
    """Answer one prompt; exit code 1 when the verifier refused it, or when it must be verified and
    is not."""
    if arguments.logprobs is not None and not (arguments.json or arguments.jsonl):
        raise UsageError("--logprobs has no place in plain text", hint="add --json or --jsonl")
    schema = options.read_schema(arguments.json_schema)
    prompt = options.read_prompt(arguments.prompt, arguments.file)
    seed = options.draw_seed()
    settings = options.settings_from(arguments, seed=seed)
    asked: dict[str, Any] = {
        "prompt": _messages(arguments, prompt),
        "raw": arguments.raw,
        "grammar": schema,
    }
    remarks = not (arguments.json or arguments.jsonl or arguments.quiet)
    # Scripts know their model.
    tells_of_the_toy = remarks and sys.stderr.isatty()
    # What stands behind a verifier elsewhere is known once it has answered.
    is_elsewhere = settings.verifier not in ("", "local") and not settings.offline
    if tells_of_the_toy and not is_elsewhere:
        _tell_of_the_toy(settings, beside_an_engine=bool(settings.upstream))
    answer = asyncio.run(
        _answer(settings, arguments.json_schema, asked, _view(arguments, settings))
    )
    if arguments.json:
        options.print_json(answer.report() | {"seed": settings.seed})
    if remarks or arguments.jsonl:
        options.tell_seed(settings, seed)
    if tells_of_the_toy and is_elsewhere:
        _tell_of_the_toy(settings, beside_an_engine=answer.beside_an_engine)
    if remarks and answer.done is not None:
        reason = answer.done.reason
        remark = whose_tokens(reason, settings.bundle, beside_an_engine=answer.beside_an_engine)
        if remark:
            options.say(remark)
    if answer.stopped:
        return 128 + signal.SIGTERM
    if not answer.verified:
        _tell_unverified(answer, settings, is_error=arguments.require_verified, remarks=remarks)
    return 0


def _tell_of_the_toy(settings: ClientSettings, *, beside_an_engine: bool) -> None:
    """Tell that the model is the embedded toy, if it is. Beside an engine it writes only offline."""
    remark = "" if beside_an_engine else toy(settings.bundle)
    if remark:
        options.say(remark)


def _tell_unverified(
    answer: JsonAnswer, settings: ClientSettings, *, is_error: bool, remarks: bool
) -> None:
    """Tell that the target has not verified all of the answer: as an error if the verifier refused
    it or `is_error` says so, else as a remark where `remarks` are wanted."""
    if answer.refused:
        if remarks and answer.texts:  # a token may be revoked in mid-answer
            options.say(f"{how_much_verified(answer)} was verified by the target")
        raise refused(answer.refused, settings.who_verifies)
    if is_error:
        raise MoaError(not_verified(answer, settings), hint="--require-verified")
    if settings.offline and sys.stdout.isatty():
        return  # the line of figures says it
    if remarks and answer.texts:
        can_be = "; --require-verified makes this an error" if settings.verifier else ""
        options.say(not_verified(answer, settings) + can_be)


def not_verified(answer: JsonAnswer, settings: ClientSettings) -> str:
    """How much of the answer is not verified, and why; what to do where no verifier was named."""
    line = f"{how_much_verified(answer)} was verified by the target"
    if settings.offline:
        return line  # as it was asked for
    if not settings.verifier:
        return f"{line}: no verifier was named (--verifier ws://HOST:PORT, or local to start one)"
    verifier = settings.who_verifies if settings.verifier == "local" else settings.verifier
    # An upstream is no connection that can be lost: what it said is the reason.
    link = answer.trouble or Link(state="none")
    is_about_link = not settings.upstream and verifier in link.detail
    if link.state == "offline" and link.detail and not is_about_link:
        return f"{line}: {link.detail}"
    if link.state == "offline" and answer.was_online:
        return f"{line}: the connection to {verifier} was lost"
    if link.state == "offline":
        return f"{line}: {verifier} could not be reached"
    if link.state in ("connecting", *OVERDUE):
        return f"{line}: {link.detail or f'{verifier} did not answer in time'}"
    return line


def _messages(arguments: argparse.Namespace, prompt: str) -> str | list[dict[str, str]]:
    """The prompt, or a chat of the system message and the prompt."""
    if arguments.system is None:
        return prompt
    if arguments.raw:
        raise UsageError("--system needs a chat, and --raw has none: give one of them")
    return [{"role": "system", "content": arguments.system}, {"role": "user", "content": prompt}]


def _view(arguments: argparse.Namespace, settings: ClientSettings) -> View:
    """The view that the flags ask for."""
    if arguments.jsonl:
        return JsonLines()
    if arguments.quiet:
        return PipeView(remarks=False)
    return make_view(
        quiet=arguments.json, says_unverified=False, who_verifies=settings.who_verifies
    )


async def _answer(
    settings: ClientSettings, schema_file: Path | None, asked: dict[str, Any], view: View
) -> JsonAnswer:
    """Answer the prompt, show the answer as it comes, and return it. SIGTERM ends it where it is.
    `asked` are the arguments of `EdgeClient.generate`."""
    answer = JsonAnswer()
    _stop_at_sigterm(answer)
    try:
        async with options.opened(settings) as client:
            options.check_schema(asked["grammar"], schema_file, client.device)
            try:
                with view:
                    async for event in client.generate(**asked):
                        answer.take(event)
                        view.take(event)
            finally:
                answer.beside_an_engine = client.shared.has_engine_behind
    except asyncio.CancelledError:
        if not answer.stopped:  # cancelled by somebody else
            raise
        if answer.done is None:
            done = answer.cancelled()
            answer.take(done)
            if isinstance(view, JsonLines | PipeView):  # a terminal shows the text already
                view.take(done)
    return answer


def _stop_at_sigterm(answer: JsonAnswer) -> None:
    """Let a SIGTERM cancel the present task, and note in the answer that it was that. Not every
    system can: there it ends the program."""
    task = asyncio.current_task()
    assert task is not None  # this is called in a coroutine
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, answer.stop, task)


class News:
    """Tells events that say something new: a verifier that reads says so again each second, as a
    sign of life, though it has not come further."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def has(self, event: Event) -> bool:
        """Whether a program is to be told of this event."""
        if not isinstance(event, Progress):
            return True
        is_new = event != self._progress
        self._progress = event
        return is_new


class JsonLines(View):
    """Every event as it happens, for programs."""

    def __init__(self) -> None:
        self._news = News()

    def take(self, event: Event) -> None:
        """Print it."""
        if self._news.has(event):
            options.print_json(event)


class JsonAnswer(AnswerSoFar):
    """An answer as one JSON object."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] = []
        """Events that no other field tells."""
        self._news = News()
        self.stopped = False
        """Whether the process was told to end."""
        self.beside_an_engine = False
        """Whether somebody else's engine is known to stand behind the device, or its verifier."""
        self.refused = ""
        """Why the verifier refuses, if it does."""
        self.was_online = False
        """Whether the verifier has answered at all."""

    def stop(self, task: asyncio.Task[Any]) -> None:
        """End the answer where it is."""
        self.stopped = True
        task.cancel()

    def cancelled(self) -> Done:
        """The end of an answer that was stopped."""
        return Done(
            reason="cancelled",
            verified=set(self.statuses) == {"verified"},
            text=self.text_of(),
            stats={},
        )

    def take(self, event: Event) -> None:
        """Take in the next event."""
        super().take(event)
        if isinstance(event, Link):
            self.was_online = self.was_online or event.state == "online"
            self.refused = event.detail if event.state == "refused" else ""
        in_other_fields = isinstance(event, Prompt | Token | Done)
        if not in_other_fields and self._news.has(event):
            self._events.append(event)

    @property
    def verified(self) -> bool:
        """Whether every token is the target's own."""
        return self.done is not None and self.done.verified

    def report(self) -> dict[str, Any]:
        """Returns the answer as one JSON object: text, how many of its first characters are verified,
        why the verifier refused if it did, tokens and their status, events, figures."""
        done = self.done
        return {
            "text": done.text if done else "",
            "reason": done.reason if done else "link",
            "verified": self.verified,
            "verified_characters": len(self.text_of(0, self.verified_beginning)),
            "refused": self.refused,
            "prompt_ids": self.prompt,
            "token_ids": self.ids,
            "status": self.statuses,
            "events": [msgspec.to_builtins(event) for event in self._events],
            "stats": done.stats if done else {},
        }
