"""Where a user's files lie, and that a user without a home folder has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.bundles.store import installed, locate
from edge_client.screen.reader import EditingReader
from edge_client.settings import ClientSettings, config_file
from moa.errors import UsageError
from moa.process.user_folders import (
    NoHomeError,
    cache_folder,
    config_folder,
    expanded,
    state_folder,
)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number without an entry, and without HOME."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_nothing_of_the_users_is_found_and_all_goes_on() -> None:
    assert ClientSettings.load({"top_k": 3}, environment={}).top_k == 3
    assert locate("something") == "something"
    assert list(installed()) == []
    EditingReader(lambda text: [])


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_what_must_be_there_is_an_error_of_one_line() -> None:
    for needs in (config_file, state_folder, lambda: cache_folder("x")):
        with pytest.raises(NoHomeError, match="no home folder"):
            needs()
    with pytest.raises(UsageError, match="home directory"):
        expanded("~/bundle")


def test_a_variable_says_where_else(tmp_path: Path) -> None:
    assert config_folder({"XDG_CONFIG_HOME": str(tmp_path)}) == tmp_path / "moa-edge"
    assert config_file(environment={"MOA_EDGE_CONFIG": "here.toml"}) == Path("here.toml")
