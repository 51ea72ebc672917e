"""`moa-export setup`: from a target and a sibling to texts that are the target's own, with and
without training."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.cli import parser, settings_from
from cloud_verifier.model import load
from edge_client import EdgeClient
from edge_client.events import AnswerSoFar
from export.build import step_times
from export.cli import main
from export.setup import Setup, make_setup_plan, next_commands
from moa.bundle import Bundle
from moa.cli.working import roughly
from moa.errors import UnsupportedModelError
from testing import gguf_tiny
from testing.tiny import save_tiny, tiny
from tests.target.test_gguf_folder import rounded, written
from tests.verifier.kit import client, generate

IDS = [20, 31, 42, 53, 64]
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}


def save_siblings(folder: Path, family: str, small: str = "") -> tuple[Path, Path]:
    return save_tiny(family, folder / "target"), save_tiny(
        small or family, folder / "small", seed=5, **SMALL
    )


async def verified_text(bundle: Path, serve: list[str], count: int) -> list[int]:
    settings = settings_from(parser().parse_args(["serve", "--port", "0", "--slots", "2", *serve]))
    async with (
        Verifier(load(settings), settings).open() as running,
        EdgeClient(verifier=running.transport.url, bundle=bundle, max_new_tokens=count) as client,
    ):
        answer = AnswerSoFar()
        async for event in client.generate(ids=IDS):
            answer.take(event)
    assert answer.done is not None
    assert answer.done.verified
    return answer.ids


@pytest.fixture(autouse=True)
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.build.step_times", partial(step_times, threads=(1,), seconds=0.001))


def test_a_model_that_is_its_own_target_is_for_an_endpoint() -> None:
    own = Setup(target="small.gguf", sibling="small.gguf", out=Path("mine"))
    commands = " ".join(next_commands(own))
    assert "--upstream URL --bundle mine/bundle" in commands
    assert "cloud-verifier" not in commands


async def test_a_sibling_drafts_and_the_text_is_the_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, small = save_siblings(tmp_path, "gemma3")
    out = tmp_path / "out"
    assert (
        await asyncio.to_thread(
            main, ["setup", str(target), "--sibling", str(small), "--out", str(out)]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert f"cloud-verifier serve --target {target} --host" in printed
    assert not (out / "drafter").exists()
    text = await verified_text(out / "bundle", ["--target", str(target), "--dtype", "float32"], 16)
    assert text == generate(tiny("gemma3"), IDS, 16)
    # The same bundle drafts at the server, too.
    words = ["serve", "--target", str(target), "--dtype", "float32", "--port", "0"]
    settings = settings_from(parser().parse_args([*words, "--bundle", str(out / "bundle")]))
    served = load(settings)
    assert served.drafts == "sibling, cpu-int4"
    async with Verifier(served, settings).open() as running, client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=16)
        while not session.finish:
            await edge.stream(session)
    assert session.log[len(IDS) :] == text


async def test_with_records_the_sibling_stays_and_its_attention_to_records_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A body of another family and width, with its own embedding and head: the build compares its
    graph with torch."""
    target, small = save_siblings(tmp_path, "llama", "qwen3")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        "".join(json.dumps({"text": f"{n} and {n + 1} " * 12}) + "\n" for n in range(40))
    )
    out = tmp_path / "out"
    words = [
        "setup",
        str(target),
        "--sibling",
        str(small),
        "--out",
        str(out),
        "--records",
        str(chats),
        "--steps",
        "2",
    ]
    assert await asyncio.to_thread(main, words) == 0
    assert f"--drafter {out / 'drafter'}" in capsys.readouterr().out
    manifest = Bundle.open(out / "bundle").manifest
    assert manifest.drafter.kind == "moa"
    assert [(layer.kv_heads, layer.head_dim) for layer in manifest.cache] == [(2, 16)]
    serve = ["--target", str(target), "--drafter", str(out / "drafter"), "--dtype", "float32"]
    assert await verified_text(out / "bundle", serve, 16) == generate(tiny("llama"), IDS, 16)


def test_what_cannot_be_a_sibling_is_refused_and_others_here_are_named(tmp_path: Path) -> None:
    target = save_tiny("llama", tmp_path / "target")
    small = save_tiny("mixtral", tmp_path / "small")
    setup = Setup(target=str(target), sibling=str(small), out=tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match="mixtral cannot be a sibling") as alone:
        make_setup_plan(setup)
    assert "here are" not in alone.value.hint
    other = save_tiny("qwen3", tmp_path / "other")
    save_tiny("qwen3", tmp_path / "foreign", vocab_size=120)
    (tmp_path / "no model").mkdir()
    with pytest.raises(UnsupportedModelError, match="experts") as refused:
        make_setup_plan(setup)
    assert refused.value.hint == f"here are models of the same tokenizer: {other}"


def test_a_dry_run_says_sizes_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, small = save_siblings(tmp_path, "qwen3")
    out = tmp_path / "out"
    words = [
        "setup",
        str(target),
        "--sibling",
        str(small),
        "--out",
        str(out),
        "--dry-run",
        "--json",
    ]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (
        plan["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 2
    )  # keys and values, layers, heads, width, bytes
    assert plan["target_bytes"] == 2 * plan["target_weights"]
    assert plan["disk_bytes"] > 0
    assert not out.exists()
    other = save_tiny("llama", tmp_path / "other", vocab_size=144)
    assert (
        main(["setup", str(target), "--sibling", str(other), "--out", str(out), "--dry-run"]) == 2
    )
    assert "has another tokenizer than" in capsys.readouterr().err


@pytest.mark.parametrize(("slower", "told"), [(1.2, False), (4.0, True)])
def test_a_plan_says_what_a_busy_machine_makes_of_its_time(
    slower: float, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, small = save_siblings(tmp_path, "qwen3")
    monkeypatch.setattr("export.setup.slowdown", lambda: slower)
    plan = make_setup_plan(Setup(target=str(target), sibling=str(small), out=tmp_path / "out"))
    lines = "\n".join(plan.lines())
    now = f"this machine is busy: about {roughly(slower * plan.export.seconds)} s now"
    assert (now in lines) is told
    assert "a forward of the target takes at least" in lines
    assert "(laptop, 40 GB/s)" in lines.partition("a step on the device")[0]


@pytest.mark.parametrize("gguf", [False, True])
def test_a_sibling_is_compared_with_its_target_where_prompts_are_given(
    gguf: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if gguf:
        gguf_tiny.need_llama()
        target = gguf_tiny.save(tiny("qwen2"), tmp_path / "large.gguf")
        small = tiny("qwen2", seed=5, **SMALL)
        sibling = gguf_tiny.save(small, tmp_path / "little.gguf")
    else:
        target, sibling = save_siblings(tmp_path, "qwen2")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Tell me something.\nAnd more of it.\n")
    command = ["setup", str(target), "--sibling", str(sibling), "-o", str(tmp_path / "out")]
    assert main([*command, "--calibration", str(tmp_path / "missing")]) == 2
    assert "no file at" in capsys.readouterr().err
    assert main([*command, "--calibration", str(prompts)]) == 0
    assert "calibration: none" not in capsys.readouterr().err
    calibration = Bundle.open(tmp_path / "out" / "bundle").manifest.calibration
    assert calibration is not None
    assert (calibration.prompts, calibration.source) == (2, "prompts.txt")
    assert calibration.offline.lengths
    if gguf:
        return  # what it does without prompts does not depend on the files
    assert main([*command, "--force"]) == 0
    assert "`moa-export setup --calibration FILE` measures it" in capsys.readouterr().err
    assert Bundle.open(tmp_path / "out" / "bundle").manifest.calibration is None


def test_both_may_be_gguf_files_and_the_target_s_weights_are_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    large = written("qwen2", rounded("qwen2", vocab_size=260), tmp_path / "large.gguf")
    small = rounded("qwen2", vocab_size=260, num_hidden_layers=1)
    little = written("qwen2", small, tmp_path / "little.gguf")
    assert main(["setup", str(large), "--sibling", str(little), "-o", str(tmp_path / "out")]) == 0
    bundle = Bundle.open(tmp_path / "out" / "bundle")
    assert bundle.manifest.drafter.kind == "independent"
    unpacked = [path.parent.name[:6] for path in (tmp_path / "cache").rglob("*.safetensors")]
    assert unpacked == ["little"]
