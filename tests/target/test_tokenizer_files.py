"""A tokenizer's identity from files alone; bundles that are for another one are refused by it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.device import embedded_bundle
from moa import demo
from moa.bundle import Bundle
from moa.errors import UsageError
from moa.target.loading import tokenizer_hash_of
from moa.target.tokenizer_files import hash_in_files, refuse_other_tokenizer
from testing.gguf_tiny import save
from testing.tiny import save_tiny, tiny

EMBEDDED = embedded_bundle()


def test_files_tell_the_hash_that_a_verifier_compares(tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path / "target", num_hidden_layers=1)
    assert hash_in_files(folder) == tokenizer_hash_of(folder) != ""
    file = save(tiny("qwen2", num_hidden_layers=1), tmp_path / "target.gguf")
    assert hash_in_files(file) == tokenizer_hash_of(file) != ""
    assert hash_in_files(demo.paths().target) == Bundle.open(EMBEDDED).manifest.tokenizer.hash
    (folder / "tokenizer.json").unlink()
    assert hash_in_files(folder) == ""


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_bundle_for_another_tokenizer_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "mine.gguf"
    if kind == "file":
        save(tiny("qwen2", num_hidden_layers=1), target)
    else:
        target = save_tiny("qwen2", tmp_path / "mine", num_hidden_layers=1)
    with pytest.raises(UsageError) as refused:
        refuse_other_tokenizer(EMBEDDED, target, hint="give another one")
    source = Bundle.open(EMBEDDED).manifest.target.source
    assert refused.value.line() == (
        f"the bundle {EMBEDDED} was made for {source}, and {target} has another tokenizer"
        " (give another one)"
    )
    assert refused.value.exit_code == 2


def test_a_bundle_for_the_same_one_is_not_nor_where_nothing_is_known(tmp_path: Path) -> None:
    refuse_other_tokenizer(EMBEDDED, demo.paths().target, hint="")
    folder = save_tiny("qwen2", tmp_path / "target", num_hidden_layers=1)
    (folder / "tokenizer.json").unlink()
    refuse_other_tokenizer(EMBEDDED, folder, hint="")


def test_it_takes_no_library_that_loads_models() -> None:
    """Those take a quarter of a minute to import."""
    program = (
        "import sys; from moa import demo\n"
        "from moa.target.tokenizer_files import refuse_other_tokenizer\n"
        "paths = demo.paths(); refuse_other_tokenizer(paths.bundle, paths.target, hint='')\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert said.stdout.strip() == "[]"
