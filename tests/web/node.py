"""Runs the browser's modules in node: a program that answers a JSON line with a JSON line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

import pytest

FOLDER = Path(__file__).parents[2] / "edge_client" / "web" / "turn"
PATIENCE = 60.0


def camel(settings: dict[str, Any]) -> dict[str, Any]:
    """The same by the browser's names."""
    return {
        re.sub("_(.)", lambda found: found[1].upper(), name): value
        for name, value in settings.items()
    }


def command(*arguments: str) -> list[str]:
    """Of node; without one the test is skipped."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node")
    return [node, "--disable-warning=MODULE_TYPELESS_PACKAGE_JSON", *arguments]


class Node:
    """One process; `handle` is the body of an async function of `ask`, with the modules imported by
    `imports`."""

    def __init__(self, imports: str, handle: str) -> None:
        names = imports.replace(' from "./', f' from "{FOLDER.as_uri()}/')
        program = f"""
            import {{ createInterface }} from "node:readline";
            {names}
            const hex = (bytes) => Buffer.from(bytes).toString("hex");
            const unhex = (text) => new Uint8Array(Buffer.from(text, "hex"));
            const packed = (key, value) => (value instanceof Uint8Array ? {{ hex: hex(value) }} : value);
            const unpacked = (key, value) => (value?.hex !== undefined ? unhex(value.hex) : value);
            for await (const line of createInterface({{ input: process.stdin }})) {{
              const ask = JSON.parse(line, unpacked);
              const answer = await (async () => {{ {handle} }})();
              process.stdout.write(JSON.stringify(answer ?? null, packed) + "\\n");
            }}
        """
        self._process = subprocess.Popen(
            command("--input-type=module", "-e", program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: Any) -> Any:
        """Its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question, default=_packed) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"node ended with {self._process.wait(PATIENCE)}"
        return json.loads(
            line, object_hook=lambda value: bytes.fromhex(value["hex"]) if "hex" in value else value
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=PATIENCE)


def _packed(value: object) -> object:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    raise TypeError(f"{value!r} is not JSON")
