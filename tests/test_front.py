"""The installed commands, and `moa-edge`: lists every program, prints versions, completes commands,
and names a missing extra in one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moa.cli.command_line import CommandParser
from moa.cli.moa_edge import MAIN_MODULES, PROGRAMS, SHELLS, completion, main
from moa.version import running_version

_BASE = """
import sys
for name in ("torch", "transformers", "optimum", "onnx", "onnxscript", "safetensors", "huggingface_hub"):
    sys.modules[name] = None
from moa.cli.moa_edge import main
main()
"""
"""The base install."""
_ONE_AFTER_THE_OTHER = (
    _BASE.removesuffix("main()\n")
    + """
import contextlib, io, json
found = []
for sys.argv in json.loads(sys.argv[1]):
    said = io.StringIO()
    code = None
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try: main()
        except SystemExit as end: code = end.code
    found.append((code, said.getvalue()))
print(json.dumps(found))
"""
)
"""Many commands in one process: to start one for each takes half a second."""


class Refusal(NamedTuple):
    """How a command has ended that was typed wrongly."""

    code: int
    said: str


def run(*words: str, program: str = _BASE, **how: Any) -> subprocess.CompletedProcess[bytes]:
    how = {"capture_output": True, "stdin": subprocess.DEVNULL} | how
    return subprocess.run([sys.executable, "-c", program, *words], timeout=300, check=False, **how)


@pytest.mark.parametrize(
    ("missing", "extras"),
    [((), []), (("onnxscript",), ["export"]), (("torch",), ["verifier", "train"])],
    ids=str,
)
def test_it_names_the_programs_and_says_how_to_install_what_is_not_installed(
    missing: tuple[str, ...],
    extras: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "moa.cli.moa_edge.find_spec", lambda module: None if module in missing else module
    )
    with pytest.raises(SystemExit) as end:
        main([])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert all(program.name in shown for program in PROGRAMS)
    assert "edge-client demo" in shown
    assert re.findall(r"install\s+'\.\[(\w+)\]'", shown) == extras
    assert {program.extra for program in PROGRAMS if program.extra} == set(MAIN_MODULES)


def test_version_and_help_need_the_base_install_only() -> None:
    scripts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"][
        "scripts"
    ]
    words = [
        (where.partition(":"), [name, word])
        for name, where in scripts.items()
        for word in ("--version", "--help")
    ]
    words += [
        (("moa.cli.moa_edge", ":", "main"), ["moa-edge", one.short, "--version"])
        for one in PROGRAMS
    ]
    each = f"""
from importlib import import_module
for (module, _, function), sys.argv in {words}:
    try: getattr(import_module(module), function)()
    except SystemExit: pass
"""
    said = run(program=_BASE.removesuffix("main()\n") + each).stdout.decode()
    for one in PROGRAMS:
        assert said.count(f"{one.name} {running_version()}\n") == 2
        assert f"usage: {one.name}" in said
    assert said.count(f"moa-edge {running_version()}\n") == 1


@pytest.mark.parametrize(
    ("words", "missing", "extra"),
    [
        (("cloud-verifier", "serve", "--port", "0"), b"torch", b"verifier"),
        (("moa-train", "target", "--data", "x.jsonl", "--out", "out"), b"torch", b"train"),
        (("moa-export", "build", "--out", "nowhere"), b"torch", b"export"),
        (("edge-client", "generate", "--raw", "hi", "--verifier", "local"), b"torch", b"verifier"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    words: tuple[str, ...], missing: bytes, extra: bytes
) -> None:
    done = run(*words)
    assert done.returncode in (1, 2)
    assert done.stderr.count(b"\n") == 1, done.stderr
    assert missing in done.stderr
    assert b"pip install '.[" + extra + b"]' -c constraints.txt" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words", [(), ("completion", "bash"), ("verifier", "token", "new")], ids=" ".join
)
def test_output_that_cannot_be_written_or_has_no_place_is_one_line(words: tuple[str, ...]) -> None:
    program = [sys.executable, "-c", "from moa.cli.moa_edge import main; main()", *words]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            program, stdout=full, stderr=subprocess.PIPE, timeout=300, check=False
        )
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert b"No space left on device" in done.stderr
    shell = ["sh", "-c", f"{shlex.join(program)} >&-"]
    done = subprocess.run(shell, capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert b"standard output is closed" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_closed_stream_is_no_traceback(stream: int) -> None:
    program = "from moa.cli.moa_edge import main; main()"
    command = f'exec {stream}>&-; exec "{sys.executable}" -c "{program}" client generate --raw hi'
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=300, check=False)
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_program_and_its_flags(shell: str) -> None:
    script = completion(shell)
    for words in (
        *(program.name for program in PROGRAMS),
        "max-new-tokens",
        "--calibration",
        "--slots",
    ):
        assert words.lstrip("-") in script
    if found := shutil.which(shell):
        done = subprocess.run(
            [found, "-n", "/dev/stdin"], input=script.encode(), capture_output=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    if found and shell == "bash":
        script += "\nCOMP_WORDS=(edge-client generate --max-n); COMP_CWORD=2; _shtab_edge_client; echo ${COMPREPLY[@]}"
        done = subprocess.run([found, "-c", script], capture_output=True, timeout=300, check=True)
        assert done.stdout.split() == [b"--max-new-tokens"]


def test_a_docstring_as_description_loses_its_indentation() -> None:
    """Python 3.13 takes it away by itself, so help and its pages would differ between versions."""
    assert (
        CommandParser(prog="x", description="One.\n\n    Two.\n    ").description == "One.\n\nTwo."
    )


PRESS = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
DURING_IMPORTS = f"""
import sys
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "edge_client.cli":
            {PRESS}
sys.meta_path.insert(0, Slow())
from moa.cli.console_scripts import edge_client
edge_client()
"""
AFTER_THE_END = f"""
import atexit
def press():
    {PRESS}
atexit.register(press)
from moa.cli.console_scripts import edge_client
edge_client()
"""


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_ctrl_c_shows_no_traceback_and_stays_ignored_for_who_wants_that() -> None:
    for program in (DURING_IMPORTS, AFTER_THE_END):
        done = run(
            "--version",
            program=program,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
    ignoring = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as `nohup` starts it
    done = run("--version", program=DURING_IMPORTS, preexec_fn=ignoring)
    assert (done.returncode, b"edge-client" in done.stdout) == (0, True)


def test_little_is_imported_before_ctrl_c_ends_the_process_quietly() -> None:
    """Until then it would show a traceback; reading the version took 20 ms."""
    program = (
        "import sys, moa.cli.console_scripts; "
        "print({'importlib.metadata', 'asyncio', 'numpy'} & set(sys.modules))"
    )
    assert run(program=program).stdout == b"set()\n"


MISTYPED_FLAGS = [
    (
        "edge-client generate hi --verifer ws://x",
        "generate: error: there is no flag --verifer: did you mean --verifier?",
    ),
    (
        "edge-client generate hi --verifer=ws://x",
        "there is no flag --verifer: did you mean --verifier?",
    ),
    ("edge-client chat --ofline", "did you mean --offline?"),
    ("cloud-verifier serve --prot 1", "did you mean --port?"),
    ("cloud-verifier token new --nmae x", "did you mean --name?"),
    ("moa-train target --dtaa x --out y", "there is no flag --dtaa: did you mean --data?"),
    ("moa-export build --targte x", "did you mean --target?"),
    ("moa-edge up --dry-rnu", "did you mean --dry-run?"),
    ("moa-edge client audit --verifer x hi", "did you mean --verifier?"),
    (
        "edge-client generate hi --qqqqqq",
        "there is no flag --qqqqqq (--help shows the options)",
    ),
    ("edge-client chat --verif ws://x", "there is no flag --verif: did you mean --verifier?"),
]
KEYS = [
    ("edge-client chat --upstream http://x/v1 --upstream-key sk-1", "--upstream-key"),
    ("edge-client generate hi --upstream-key=sk-1", "--upstream-key"),
    ("edge-client generate --upstream-key sk-1", "--upstream-key"),
    ("edge-client --upstream-key sk-1 chat", "--upstream-key"),
    ("edge-client doctor --api-key sk-1", "--api-key"),
    ("cloud-verifier serve --upstream http://x/v1 --upstream-key sk-1", "--upstream-key"),
]
MISTYPED_COMMANDS = [
    (
        "edge-client generte hi",
        "edge-client: error: there is no command generte: did you mean generate?",
    ),
    ("cloud-verifier srve --port 1", "there is no command srve: did you mean serve?"),
    ("moa-export bild", "there is no command bild: did you mean build?"),
    ("cloud-verifier token nwe", "there is no command nwe: did you mean new?"),
    ("moa-edge exprot", "there is no command exprot: did you mean export?"),
    ("moa-edge doctor", "there is no command doctor here: edge-client doctor ("),
    ("moa-edge chat --offline", "there is no command chat here: edge-client chat ("),
    ("moa-edge serve", "edge-client serve or cloud-verifier serve ("),
    ("moa-edge doctr", "there is no command doctr: did you mean edge-client doctor?"),
    ("moa-export qqqqqq", "there is no command qqqqqq: name one of build, setup ("),
    ("moa-edge completion basg", "invalid choice: 'basg' (choose from"),
]
WITHOUT_A_FLAG = [
    ("edge-client serve ws://x:1", "ws://x:1 has no flag: did you mean --verifier ws://x:1?"),
    ("edge-client chat WSS://x", "did you mean --verifier WSS://x?"),
    ("edge-client doctor local", "local has no flag: did you mean --verifier local?"),
    ("edge-client serve https://x/v1", "did you mean --upstream https://x/v1?"),
    ("cloud-verifier serve --port 0 models/big", "did you mean --target models/big?"),
    ("cloud-verifier serve https://x/v1", "did you mean --upstream https://x/v1?"),
    ("edge-client serve hello", "unrecognized arguments: hello ("),
    ("edge-client list ws://x", "unrecognized arguments: ws://x ("),
]


@pytest.fixture(scope="module")
def refusals() -> dict[str, Refusal]:
    """How each of these commands ends in the base install."""
    typed = [words for words, _ in MISTYPED_FLAGS + KEYS + MISTYPED_COMMANDS + WITHOUT_A_FLAG]
    commands = json.dumps([arguments(*words.split()) for words in typed])
    done = run(commands, program=_ONE_AFTER_THE_OTHER)
    assert done.returncode == 0, done.stderr
    ends = [Refusal(*end) for end in json.loads(done.stdout)]
    return dict(zip(typed, ends, strict=True))


def arguments(program: str, *words: str) -> list[str]:
    """What `moa-edge` gets so that it runs a program."""
    short = program.removeprefix("moa-").removeprefix("edge-").removeprefix("cloud-")
    return ["moa-edge", *([] if program == "moa-edge" else [short]), *words]


@pytest.mark.parametrize(("words", "says"), MISTYPED_FLAGS)
def test_a_mistyped_flag_names_the_one_that_was_meant(
    words: str, says: str, refusals: dict[str, Refusal]
) -> None:
    code, said = refusals[words]
    assert says in said
    assert (code, said.count("\n")) == (2, 1), said


def test_what_looks_like_a_flag_is_text_behind_two_dashes() -> None:
    done = run("client", "generate", "hi", "--", "--verifer")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("words", "flag"), KEYS)
def test_a_key_among_the_arguments_is_refused_and_not_shown(
    words: str, flag: str, refusals: dict[str, Refusal]
) -> None:
    """As the beginning of `--upstream-key-file` it was taken for a file, and shown as one."""
    code, said = refusals[words]
    assert f"there is no flag {flag}: every user" in said
    assert "MOA_UPSTREAM_KEY" in said
    assert "--upstream-key-file" in said
    assert "sk-1" not in said
    assert (code, said.count("\n")) == (2, 1), said


@pytest.mark.parametrize(("words", "says"), [*MISTYPED_COMMANDS, *WITHOUT_A_FLAG])
def test_a_mistyped_command_or_a_word_without_its_flag_names_what_was_meant(
    words: str, says: str, refusals: dict[str, Refusal]
) -> None:
    code, said = refusals[words]
    assert says in said
    assert (code, said.count("\n")) == (2, 1), said
