"""Lessons from security advisories of inference servers, one test each. Lessons that are tested elsewhere:

5.  a session that makes the model fail is dropped alone, and told no more than the error's type: `test_faults`
6.  constant-time comparison of tokens: `test_auth`, every entry is compared in constant time
8.  generic errors outward: `test_injected_faults`, a collaborator that raises closes with "internal error"
10. loopback unless there is authentication: `test_cli` and `test_settings`; a session is its principal's:
    `test_transport`; no prefix is shared between principals: `test_sessions`; slots are zeroed:
    `tests/model/test_slots.py`, and given back: `test_faults`
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import inspect

import cloud_verifier
import moa
from moa.wire.events import Advanced
from moa.wire.messages import ClientMessage, Error, Foresee, Open
from tests.verifier import kit

_SERVER = Path(cloud_verifier.__file__).parent
_SHARED = Path(moa.__file__).parent
_FROM_OUTSIDE = (*_SERVER.rglob("*.py"), *(_SHARED / "wire").rglob("*.py"), _SHARED / "records.py")
"""The code that handles bytes from clients."""
_LOADING = (
    *_FROM_OUTSIDE,
    *(_SHARED / "model").rglob("*.py"),
    *(_SHARED / "target").rglob("*.py"),
    *(_SHARED / "drafters").rglob("*.py"),
)
"""And the code that reads untrusted model folders."""


@cache
def _parsed(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def _nodes(files: tuple[Path, ...]) -> Iterator[tuple[str, ast.AST]]:
    assert len(files) > 20
    for file in files:
        for node in _parsed(file):
            yield f"{file.name}:{getattr(node, 'lineno', 0)}", node


def _calls(name: str) -> Iterator[tuple[str, ast.Call, str]]:
    """Calls in code that loads models, by the name of what is called: their place and source."""
    for place, node in _nodes(_LOADING):
        if isinstance(node, ast.Call) and re.fullmatch(name, source := ast.unparse(node.func)):
            yield place, node, source


def _argument(call: ast.Call, name: str) -> str:
    return next(
        (ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == name), ""
    )


def test_1_nothing_is_unpickled() -> None:
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for place, node in _nodes(_LOADING):
        if isinstance(node, ast.Import):
            assert not modules & {alias.name.split(".")[0] for alias in node.names}, place
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in modules, place
    assert not list(
        _calls(r"torch\.load|np\.load|numpy\.load|pickle|eval|exec|compile|__import__|yaml\.load")
    )


def _fields(kind: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every simple value in a message, however deep."""
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                yield from _fields(field.type, f"{path}.{field.name}")
        case inspect.ListType() | inspect.VarTupleType():
            yield path, kind
            yield from _fields(kind.item_type, f"{path}[]")
        case inspect.TupleType():
            for item in kind.item_types:
                yield from _fields(item, f"{path}[]")
        case inspect.UnionType():
            for one in kind.types:
                yield from _fields(one, path)
        case _:
            yield path, kind


FIELDS = [
    found
    for kind in get_args(ClientMessage)
    for found in _fields(inspect.type_info(kind), kind.__name__)
]


def test_2_clients_send_no_tensors() -> None:
    for path, kind in FIELDS:
        assert not isinstance(
            kind, inspect.AnyType | inspect.RawType | inspect.ExtType | inspect.DictType
        ), path
        if isinstance(kind, inspect.BytesType | inspect.ByteArrayType | inspect.MemoryViewType):
            assert kind.max_length == 16, f"{path} is a name or a hash, and no payload"


def test_3_every_number_and_length_is_bounded_before_it_is_looked_at() -> None:
    assert len(FIELDS) > 40
    for path, kind in FIELDS:
        if (
            isinstance(kind, inspect.IntType) and path != "Hello.versions[]"
        ):  # only looked up in our own versions
            assert kind.ge is not None, path
            assert kind.lt is not None or kind.le is not None, path
        if isinstance(kind, inspect.ListType | inspect.StrType | inspect.BytesType):
            assert kind.max_length is not None, path


DRAFTS: list[tuple[list[int], list[int]]] = [
    ([5, kit.VOCAB], [-1, 0]),
    ([5, 6, 7], [-1, 2, 0]),
    ([5] * (kit.LIMITS.max_guess_tokens + 1), [-1] + [0] * kit.LIMITS.max_guess_tokens),
]


async def test_4_what_a_kernel_would_not_survive_never_gets_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(kit.prompt(0, 9), max_new_tokens=5)
        with monkeypatch.context() as patched:
            patched.setattr(running.work, "submit", None)
            for tokens, parents in DRAFTS:
                guesses = [session.log[-1], *tokens[1:]]
                chances = [0] * len(guesses)
                await edge.send(Foresee(session.id, 1, session.base, guesses, parents, chances))
            await edge.send(Open(bytes(16), [1, kit.VOCAB]))
            for _ in [*DRAFTS, Open]:
                answer = await edge.receive()
                assert isinstance(answer, Error)
                assert answer.code in ("bad_message", "limit")
        assert len(running.service.table) == 1
        assert isinstance(await edge.advance(session, [session.log[-1]]), Advanced)


def test_7_no_check_is_an_assert() -> None:
    for place, node in _nodes(_FROM_OUTSIDE):
        assert not isinstance(node, ast.Assert), place


def test_9_no_code_of_a_models_author_is_run_and_weights_are_safetensors() -> None:
    for place, node in _nodes(_LOADING):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert ast.unparse(node.value) == "False", place
    calls = list(_calls(r"Auto(Model\w*|Config|Tokenizer)\.from_(pretrained|config)"))
    assert len(calls) >= 3
    for place, call, name in calls:
        if name.endswith("from_pretrained"):
            assert _argument(call, "trust_remote_code") == "False", place
            assert _argument(call, "local_files_only") == "True", place
            assert _argument(call, "use_safetensors") == ("True" if "Model" in name else ""), place
