"""The one exception tree, and the one place where an exception becomes a line on the terminal.

MoaError                     anything this project reports on purpose           exit 1
├── UsageError               the user can correct it: flag, file, input         exit 2
│   ├── ConfigError          a settings or config value is out of range
│   ├── UnsupportedModelError  an architecture that cannot work, by name and reason
│   └── BundleError          an exported bundle is damaged, foreign or incomplete
├── CapacityError            a bounded resource is used up (slots, context, memory)
│   └── FullError            temporarily: it works again when others free theirs
├── NumericalError           a model computed NaN or infinity                   fatal for this text
├── DeviceError              a part of the device failed: drafter, records, tokenizer
├── ProtocolError            the other end broke the wire protocol              fatal
├── RemoteError              the other end refused, with a typed code           fatal or retryable
└── LinkError                the network failed                                 retryable
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from moa.safe_text import safe_line

_OUR_PACKAGES = ("moa", "edge_client", "cloud_verifier", "export")
_LONGEST_LINE = 2000
"""Characters of a message; the rest is cut off."""
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it."""
_EXIT_BROKEN_PIPE = 141
"""128 and the number of SIGPIPE."""


class MoaError(Exception):
    """Base of all errors of this project. `hint` says what to do about it."""

    exit_code = 1
    retryable = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(hint)  # a traceback shows it below the message

    def line(self) -> str:
        """The message and its hint as one line for the user. Control characters are escaped: the
        message may quote remote input."""
        message = " ".join(str(self).split())
        return safe_line(f"{message} ({self.hint})" if self.hint else message, _LONGEST_LINE)


class UsageError(MoaError):
    """The user can correct it: a flag, a file, an input."""

    exit_code = 2


class DeviceError(MoaError):
    """A part of the device failed, hung or returned nonsense: the drafter, the records, the
    tokenizer."""

    @classmethod
    def of(cls, part: str, error: Exception) -> MoaError:
        """An error of ours as it is, and any other as one line that names the part."""
        if isinstance(error, MoaError):
            return error
        return cls(f"{part} failed: {type(error).__name__}: {error}")


class ConfigError(UsageError):
    """A settings or config value is unknown or out of range."""


class UnsupportedModelError(UsageError):
    """This architecture cannot be a target or drafter; the message says which and why."""


class BundleError(UsageError):
    """An exported bundle is damaged, foreign or incomplete."""


class CapacityError(MoaError):
    """A bounded resource is used up."""


class FullError(CapacityError):
    """A bounded resource is used up until others free some of it."""


class NumericalError(MoaError):
    """A model computed infinite or NaN logits, from which no token can be chosen."""


class DraftError(MoaError):
    """A drafter brought what is no draft of the text it was asked for."""


class ProtocolError(MoaError):
    """The other end broke the wire protocol."""


class RemoteError(MoaError):
    """The other end refused, with a typed code."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retry_after: float | None = None,
        hint: str = "",
        limit: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.limit = limit
        self.retry_after = retry_after

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        """Whether the same request may succeed later."""
        return self.retry_after is not None


class LinkError(MoaError):
    """The network failed; trying again may help."""

    retryable = True


def run_cli(
    program: str, main: Callable[[], int | None], *, extra: str = "", stdout_needed: bool = False
) -> int:
    """Run the body of a command, and return its exit code. Every expected failure becomes one line
    on stderr; what is not expected is a defect of ours, and keeps its traceback.

    `extra` names the optional dependencies that the command may miss. With `stdout_needed` what it
    prints is what it is for: it does not begin where that would be lost.
    """
    _stand_in_for_closed_streams()
    try:
        if stdout_needed and sys.__stdout__ is None:
            raise UsageError("standard output is closed: there is nowhere to answer")
        code = main() or 0
        _flush()
        return code
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not extra or package in _OUR_PACKAGES:
            raise  # a bug of ours: the traceback helps to find it
        print(
            f"{program}: error: {error.name} is not installed ({how_to_install(extra)})",
            file=sys.stderr,
        )
        return _EXIT_USAGE
    except MoaError as error:
        print(f"{program}: error: {error.line()}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has ended (`| head`): this is no error, and nobody would read a
        # message.
        drop_stdout()
        return _EXIT_BROKEN_PIPE
    except OSError as error:
        print(f"{program}: error: {_of_the_system(error)}", file=sys.stderr)
        return _EXIT_USAGE


def _of_the_system(error: OSError) -> str:
    """An error of the system as one line: what failed, and with which file."""
    message = str(error.strerror or error)
    if error.filename:
        message += f": {error.filename}"
    return safe_line(message, _LONGEST_LINE)


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its class where it has no text."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]


def how_to_install(extra: str) -> str:
    """The command that installs the optional dependencies of this name, in the tested versions. The
    project is on no package index yet."""
    return f"in the checkout: pip install '.[{extra}]' -c constraints.txt"


def _stand_in_for_closed_streams() -> None:
    """If the program was started with a closed stream, Python has None there, and the first print
    would fail."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the program's whole life


def _flush() -> None:
    """Write what was printed, now: if that fails when the interpreter ends, it shows a traceback,
    and the exit code is lost."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise UsageError(f"standard output cannot be written: {error.strerror}") from None


def drop_stdout() -> None:
    """Send what is still to be written to nowhere, and what is printed later, so that neither that nor
    the interpreter's end fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
