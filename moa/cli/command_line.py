"""The argument parser of every program: a mistake is one line."""

from __future__ import annotations

import argparse
import inspect
from typing import Any, NoReturn

COMMAND = "COMMAND"
"""What a program with subcommands calls them."""


class CommandParser(argparse.ArgumentParser):
    """`argparse`'s own parser puts its whole usage before a mistake: a screenful where there are many options."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # Of a docstring, Python takes the indentation away since 3.13.
        self.description = self.description and inspect.cleandoc(self.description)

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        if message.endswith(f"required: {COMMAND}"):
            commands = next(one for one in self._actions if isinstance(one, argparse._SubParsersAction))
            message = f"name a command: {', '.join(commands.choices)}"
        self.exit(2, f"{self.prog}: error: {message} (--help shows the options)\n")
