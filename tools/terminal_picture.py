"""Record a chat on a real terminal whose verifier is killed and comes back, and draw its last
screen as SVG.

    python -m tools.terminal_picture docs/terminal.svg

Needs tmux. Every wait is for expected output, with a timeout.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 92
HEIGHT = 22
SECONDS = 300.0
PROGRAM = "from moa.cli.moa_edge import main; main()"
QUESTIONS = ("What is 17 plus 25?", "Write a short story about Ada, a fox and a garden.")


class Terminal:
    """A tmux session of its own."""

    def __init__(self, home: Path) -> None:
        self._socket = str(home / "tmux")
        # PYTHONPATH, so that it is this checkout that is shown.
        keep = {
            name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")
        }
        environment = {"HOME": str(home), "PS1": "$ ", "TERM": "xterm-256color", **keep}
        shell = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in environment.items() if value
        )
        size = ("-x", str(WIDTH), "-y", str(HEIGHT))
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", *size, f"env -i {shell} bash --norc --noprofile"
        )

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    def type(self, line: str) -> None:
        """Type a line and press Enter."""
        self._tmux("send-keys", "-l", line)
        self._tmux("send-keys", "Enter")

    def screen(self) -> str:
        """The screen's content, with its colours."""
        return self._tmux("capture-pane", "-e", "-p")

    def wait_for(self, pattern: str) -> None:
        """Until `pattern` is on the screen."""
        until = time.monotonic() + SECONDS
        while not re.search(pattern, Text.from_ansi(self.screen()).plain, re.MULTILINE):
            if time.monotonic() > until:
                raise TimeoutError(f"{pattern!r} is not on the screen:\n{self.screen()}")
            time.sleep(0.2)

    def close(self) -> None:
        """End it, and what runs in it."""
        subprocess.run(
            ["tmux", "-S", self._socket, "kill-server"],
            capture_output=True,
            timeout=60,
            check=False,
        )


def free_port() -> int:
    """A port that nobody has now; the verifier comes back to it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def verifier(port: int) -> subprocess.Popen[str]:
    """A verifier that listens."""
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "verifier",
        "serve",
        "--port",
        str(port),
        "--log-level",
        "error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if "listening" not in process.stdout.readline():
        raise RuntimeError("the verifier did not start")
    return process


def play(terminal: Terminal) -> str:
    """The session; returns its last screen."""
    port = free_port()
    server = verifier(port)
    try:
        terminal.type(
            f'edge-client() {{ {shlex.quote(sys.executable)} -c {shlex.quote(PROGRAM)} client "$@"; }}; clear'
        )
        terminal.type(f"edge-client chat --verifier ws://127.0.0.1:{port}")
        terminal.wait_for(r"^>")
        terminal.type(QUESTIONS[0])
        terminal.wait_for(r"· verified ·")
        server.kill()
        server.wait(60)
        terminal.type(QUESTIONS[1])
        terminal.wait_for(r"nothing verified")
        server = verifier(port)
        terminal.wait_for(r"^checked · .* verified$|the target's own$")
        time.sleep(1)  # the last of the screen is drawn
        return terminal.screen()
    finally:
        server.kill()
        server.wait(60)


def drawn(screen: str) -> str:
    """The screen as SVG, with local fonts: viewers do not load remote fonts in pictures."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.from_ansi(screen.rstrip()), end="")
    style = re.sub(
        r"@font-face \{\{.*?\}\}\s*|<!-- .*? -->", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL
    )
    return console.export_svg(
        title="the verifier is killed, and comes back", theme=MONOKAI, code_format=style
    )


def main() -> None:
    """Write the picture."""
    (out,) = sys.argv[1:]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        terminal = Terminal(Path(home))
        try:
            screen = play(terminal)
        finally:
            terminal.close()
    Path(out).write_text(drawn(screen), encoding="utf-8")


if __name__ == "__main__":
    main()
