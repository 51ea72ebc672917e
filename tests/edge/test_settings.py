"""Flag > environment > config file > default, and errors that name the setting."""

from __future__ import annotations

import dataclasses
import random
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest

from edge_client import EdgeClient, ask
from edge_client.settings import ClientSettings, SettingChanges, TurnChanges
from edge_client.turn.budget import Spending
from edge_client.turn.guard import OfflineGuard, OfflineLimits
from moa.errors import ConfigError, UsageError
from moa.manifest import Acceptance, Calibration, Offline, TreeUsed


def load(
    tmp_path: Path, text: str = "", flags: dict[str, Any] | None = None, **environment: str
) -> ClientSettings:
    home = tmp_path / "moa-edge"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)
    return ClientSettings.load(
        flags or {}, environment={"XDG_CONFIG_HOME": str(tmp_path), **environment}
    )


def test_the_order(tmp_path: Path) -> None:
    text = 'max_kbps = 10\nverifier = "ws://file"\ntop_k = 3\nstop = ["a", "b"]\n'
    settings = load(
        tmp_path, text, {"top_k": 5, "seed": None}, MOA_EDGE_VERIFIER="ws://env", MOA_EDGE_TOP_K="4"
    )
    assert (settings.max_kbps, settings.verifier, settings.top_k, settings.seed) == (
        10.0,
        "ws://env",
        5,
        0,
    )
    assert settings.stop == ("a", "b")
    settings = load(
        tmp_path, MOA_EDGE_OFFLINE="true", MOA_EDGE_TEMPERATURE="0.5", MOA_EDGE_STOP="x,y"
    )
    assert (settings.offline, settings.temperature, settings.stop) == (True, 0.5, ("x", "y"))
    (tmp_path / "mine.toml").write_text("top_k = 7\n")
    assert load(tmp_path, "top_k = 3", MOA_EDGE_CONFIG=str(tmp_path / "mine.toml")).top_k == 7
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "empty"), "MOA_EDGE_TOP_K": "0"}
    settings = ClientSettings.load(
        {}, environment=environment, defaults={"top_k": 3, "max_new_tokens": 64}
    )
    assert (settings.top_k, settings.max_new_tokens) == (0, 64), "defaults of a command come last"


@pytest.mark.parametrize(
    ("text", "environment", "flags", "what"),
    [
        ("max_kbs = 3", {}, {}, "max_kbs"),
        ("top_k = 'many'", {}, {}, "config.toml: top_k must be a whole number, not 'many'"),
        ("stop = 3", {}, {}, "config.toml: stop must be a list of texts, not 3"),
        ("= 3", {}, {}, "TOML"),
        ("", {"MOA_EDGE_TOP_K": "many"}, {}, "MOA_EDGE_TOP_K"),
        ("", {"MOA_EDGE_OFFLINE": "maybe"}, {}, "MOA_EDGE_OFFLINE must be true or false"),
        ("", {}, {"draft": "nobody"}, "draft must be one of"),
        (
            "",
            {},
            {"verifier": "http://x/"},
            r"did you mean ws://x:8765\? It is like ws://HOST:PORT",
        ),
        ("", {}, {"verifier": "http://x:9/v2"}, r"did you mean ws://x:9\?"),
        ("", {}, {"verifier": "http://x:9/v1"}, r"did you mean --upstream http://x:9/v1\?"),
        ("", {}, {"verifier": "https://x/v1/"}, r"did you mean --upstream https://x/v1/\?"),
        ("", {}, {"verifier": "https://x"}, r"did you mean wss://x\?"),
        ("verifier = 'http://x'", {}, {}, r"did you mean ws://x:8765\?"),
        ("", {"MOA_EDGE_VERIFIER": "http://x"}, {}, r"did you mean ws://x:8765\?"),
        ("", {}, {"verifier": "ftp://x"}, r"no verifier address \(It is like ws://HOST:PORT"),
        ("", {}, {"verifier": "http://"}, r"no verifier address \(It is like ws://HOST:PORT"),
        ("", {}, {"upstream": "ftp://x"}, r"'ftp://x' is no address of an upstream \(such as http"),
        ("", {"MOA_EDGE_UPSTREAM": "http://x:0"}, {}, "has no port that can be"),
        ("", {}, {"temperature": -1.0}, "temperature"),
        ("", {}, {"temperature": 9.0}, "0.001..2"),
        ("", {}, {"max_new_tokens": -1}, "max_new_tokens"),
        ("", {}, {"max_kbps": -1.0}, "max_kbps must be"),
        ("", {}, {"settle_seconds": -1.0}, "settle_seconds must be at least 0"),
        ("settle_seconds = 'long'", {}, {}, "settle_seconds must be a number, not 'long'"),
        ("", {}, {"offline": True, "verifier": "local"}, "--offline"),
        ("", {}, {"max_kbps": float("inf")}, "max_kbps must be a finite number"),
        ("max_kbps = inf", {}, {}, "max_kbps must be a finite number"),
        ("", {"MOA_EDGE_TOP_P": "nan"}, {}, "top_p must be a finite number"),
        ("a = " + "[" * 20_000, {}, {}, "not valid TOML"),
        ("# " + "x" * 2**20, {}, {}, "too large"),
        (
            "",
            {"MOA_EDGE_VERIFIR": "ws://x"},
            {},
            r"MOA_EDGE_VERIFIR \(did you mean MOA_EDGE_VERIFIER\?",
        ),
        ("", {"MOA_EDGE_FOO": "1"}, {}, r"MOA_EDGE_FOO \(known: MOA_EDGE_ANSWER_SECONDS"),
        ("port = 9222", {}, {}, r"'port' \(it is no setting, but a flag of .*serve`: --port\)"),
        ("mode = 'hold'", {}, {}, r"serve`: --mode\)"),
        ("api-key = 'a'", {}, {}, r"serve`: --api-key, or set MOA_API_KEY\)"),
        ("allowed_hosts = ['a']", {}, {}, r"serve`: --allowed-host\)"),
        ("model_name = 'a'", {}, {}, r"serve`: --model-name\)"),
        ("", {"MOA_EDGE_PORT": "9222"}, {}, r"MOA_EDGE_PORT \(it is no setting, .*--port\)"),
        ("", {"MOA_EDGE_CONFIG": "/nowhere.toml"}, {}, "no config file at /nowhere.toml"),
        ("", {}, {"stop": ("",)}, "stop string must not be empty"),
        ("", {}, {"stop": ("x" * 129,)}, "129 bytes, at most 128"),
        ("", {}, {"stop": ("\u00e9" * 65,)}, "130 bytes"),
        ("", {}, {"stop": tuple("abcdefghi")}, "9 stop strings"),
        ("", {}, {"max_kbps": 0.5}, "max_kbps must be"),
        ("", {}, {"verifier": "ws://x:65536"}, "no verifier address.*[Pp]ort out of range"),
        ("", {}, {"verifier": "ws://x:0"}, "no verifier address"),
        ("", {}, {"verifier": "ws://" + "x" * 64}, "no verifier address.*too long"),
        ("", {}, {"verifier": "ws://[::1"}, "no verifier address"),
        ("", {}, {"verifier": "ws://"}, "no verifier address"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, text: str, environment: Any, flags: Any, what: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text, flags, **environment)
    assert re.search(what, caught.value.line()), caught.value.line()


def test_paths_in_a_file_begin_at_its_folder(tmp_path: Path) -> None:
    """They began where a command was started: a key lay beside its file and was not found."""
    folder = tmp_path / "moa-edge"
    text = "upstream = 'gpu:8000'\nupstream_key_file = 'key.txt'\ntls_ca = '../ca.pem'\n"
    settings = load(tmp_path, text + "bundle = './mine'\n")
    assert settings.upstream_key_file == str(folder / "key.txt")
    assert settings.tls_ca == str(folder / "../ca.pem")
    assert settings.bundle == str(folder / "mine")
    assert load(tmp_path, "bundle = 'mine'\n").bundle == "mine", "a bundle that was pulled"
    (folder / "mine").mkdir()
    assert load(tmp_path, "bundle = 'mine'\n").bundle == str(folder / "mine")
    assert load(tmp_path, "tls_ca = '/ca.pem'\n").tls_ca == "/ca.pem"
    assert load(tmp_path, "tls_ca = '~/ca.pem'\n").tls_ca == str(Path.home() / "ca.pem")
    flags = {"tls_ca": "a.pem"}
    assert load(tmp_path, "tls_ca = 'b.pem'\n", flags).tls_ca == "a.pem", "flags: the shell's"
    assert load(tmp_path, MOA_EDGE_TLS_CA="c.pem").tls_ca == "c.pem"


def test_stop_texts_that_the_wire_would_take() -> None:
    assert ClientSettings(stop=("x" * 128, "\u00e9" * 64, *"abcdef")).stop


def test_settings_are_checked_without_evaluating_their_types_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer has settings of its own, twice: that was a sixth of what an answer's start took."""
    monkeypatch.delattr(typing, "get_type_hints")
    assert ClientSettings(draft="none").draft == "none"
    with pytest.raises(UsageError, match="draft must be one of"):
        ClientSettings(draft=cast(Any, "sometimes"))


def test_keywords_are_the_settings() -> None:
    assert get_type_hints(SettingChanges) == get_type_hints(ClientSettings)


def test_spending_bytes_is_waited_for() -> None:
    spending = Spending(max_kbps=8)  # 1000 bytes a second, two seconds of burst
    assert spending.wait(now=0.0) == 0
    spending.passed = 3000
    assert spending.wait(now=0.0) == pytest.approx(1.0)
    assert spending.wait(now=0.5) == pytest.approx(0.5)
    assert spending.wait(now=5.0) == 0
    spending.passed = 4000
    assert spending.wait(now=100.0) == 0


def test_the_guard_warns_once_for_each_time_offline() -> None:
    guard = OfflineGuard(OfflineLimits(warn_at=3, stop_at=5))
    assert [bool(guard.warning(n)) for n in (1, 2, 3, 4)] == [False, False, True, False]
    assert [guard.stops(range(n)) for n in (4, 5)] == [False, True]
    guard.reset()
    assert guard.warning(3)


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_guard_stops_text_that_repeats_itself(calibrated: bool) -> None:
    """A drafter that knows no answer went on to an app's 1,000 tokens for a title."""
    calibration = _calibrated((0.9,)) if calibrated else None
    guard = OfflineGuard.of(calibration, -1, lambda: True)
    varied = list(range(1000))
    few = [1, 2, 3, 4, 5] * 10
    for text, stops in (
        (varied, False),
        ([*varied, *few], False),
        ([*varied, *few, *few], True),
        ([*few, *varied], False),
    ):
        assert guard.stops(text) == stops
    assert not OfflineGuard.of(calibration, 500, lambda: True).stops(
        few * 5
    )  # the user's own limit


def test_the_guard_stops_text_that_repeats_a_paragraph() -> None:
    """A sibling wrote the same 45 tokens ten times, up to the limit."""
    guard = OfflineGuard.of(None, -1, lambda: True)
    paragraph = list(range(500, 545))
    lengths = [n for n in range(450) if guard.stops((list(range(100)) + paragraph * 10)[:n])]
    assert lengths[0] in range(190, 215), "after two and a half times"
    # The beginning of the text is verified meanwhile: it is another text
    assert not guard.stops([1, 2, 3, *range(200)])
    lines = [token for line in range(40) for token in (7, 8, 9, 10, 600 + line, 11, 12, 13, 14, 15)]
    assert not guard.stops(lines), "code whose lines differ in a name"


def test_the_guard_stops_items_that_differ_in_their_number_alone() -> None:
    """A sibling numbered the same paragraph of 45 tokens 56 times."""
    guard = OfflineGuard.of(None, -1, lambda: True)
    paragraph = list(range(500, 543))
    text = [token for item in range(10, 66) for token in (item // 10, item % 10, *paragraph)]
    lengths = [n for n in range(len(text)) if guard.stops(text[:n])]
    assert lengths[0] in range(215, 245), "in the sixth of them"
    rows = [token for row in range(100) for token in (7, 8, 9, 10, 11, 12, 100 + row, 300 + row)]
    assert not guard.stops(rows), "a table that says something in each row"


def _spelled(text: str) -> list[int]:
    """Digits and signs are tokens of one character, each word is a token with the space before it."""
    return [
        _VOCABULARY.setdefault(piece, len(_VOCABULARY))
        for piece in re.findall(r"\d|\n| ?[^\W\d]+| ?[^\w\s]| ", text)
    ]


_VOCABULARY: dict[str, int] = {}


def _text_of(ids: Sequence[int]) -> str:
    return "".join(list(_VOCABULARY)[token] for token in ids)


_WORDS = [one + other for one in "bdfgklmnprst" for other in ("a", "ed", "ig", "ol", "un")]


@pytest.mark.parametrize(
    ("item", "stops"),
    [
        (lambda n: f"{n}. {('water', 'food')[n % 2]} ", True),
        (lambda n: f"{n}) {('water', 'fresh food', 'tents')[n % 3]}\n", True),
        (lambda n: f"**Step {n}:** {('add water', 'stir')[n % 2]}\n\n", True),
        (lambda n: f"{n + 14}. water\n", True),
        (lambda n: f"{n}. {_WORDS[n % 60]}\n", False),
        (lambda n: f"{n}. Take {_WORDS[n % 60]} with you.\n", False),
        (lambda n: f"{n}. {7 * n} is 7 times {n}\n", False),
        (lambda n: f"7 x {n} = {7 * n}.\n", False),
        (lambda n: f"{n}, ", False),
    ],
    ids=["circle", "three", "steps", "one", "words", "sentences", "table", "products", "numbers"],
)
@pytest.mark.parametrize("calibrated", [False, True])
def test_the_guard_stops_a_numbered_list_that_goes_round_in_circles(
    item: Callable[[int], str], stops: bool, calibrated: bool
) -> None:
    """Numbers that count up hide no repetition of what stands behind them, and stop no list."""
    guard = OfflineGuard.of(
        _calibrated((0.9,)) if calibrated else None, -1, lambda: True, decode=_text_of
    )
    text = _spelled("".join(item(n) for n in range(1, 61)))
    stopped = next((n for n in range(len(text)) if guard.stops(text[:n])), 0)
    if stops:
        assert 64 <= stopped < 160
    else:
        assert not stopped, _text_of(text[:stopped])


def test_a_number_without_end_counts_nothing() -> None:
    """Python reads no number of more than 4,300 digits."""
    guard = OfflineGuard.of(None, -1, lambda: True, decode=_text_of)
    text = _spelled(
        "".join(random.Random(1).choices("0123456789abcdefgh ", k=99)) + "1" * 5000 + "."
    )
    assert guard.stops(text), "of ones alone"
    assert not guard.stops(_spelled(" ".join(_WORDS) + "12345" * 9 + ". " + " ".join(_WORDS[::-1])))


def test_the_guard_lets_a_list_of_alike_objects_come_to_its_end() -> None:
    """It ended one after 121 tokens, in the middle of an object."""
    guard = OfflineGuard.of(None, -1, lambda: True, structured=True)
    keys = list(range(500, 524))
    text = [token for item in range(100) for token in (item // 10, *keys, item % 2)]
    lengths = [n for n in range(len(text)) if guard.stops(text[:n])]
    assert lengths[0] > 450, "about twenty objects"
    assert lengths[0] < 700, "and one without end is not written to the context's"
    spaces = [7] * 64
    assert guard.stops(spaces)


def test_limits_that_were_not_measured_say_so() -> None:
    assert "was not measured" in OfflineGuard.of(None, -1, lambda: True).warning(64)
    measured = OfflineGuard.of(_calibrated((0.9, 0.1)), -1, lambda: True)
    assert "expect mistakes" in measured.warning(64)


def _calibrated(*agreement: tuple[float, ...]) -> Calibration:
    """How often a drafter with records agrees after 1, 2, 4, 8 and 16 tokens, and one without,
    where that is known."""
    curves = (
        Offline(lengths=(1, 2, 4, 8, 16)[: len(one)], agreement=one, unbroken=one)
        for one in agreement
    )
    reached = Acceptance(
        chain=(0.5,), tree=(0.5,), tree_shape=TreeUsed(breadth=1, depth=1, nodes=1)
    )
    about: Any = dict(zip(("offline", "cold"), curves, strict=False))
    return Calibration(prompts=1, tokens=1, source="", acceptance=reached, **about)


def test_the_guard_trusts_a_drafter_less_that_has_no_records() -> None:
    informed = True
    calibration = _calibrated((0.9, 0.9, 0.9, 0.5, 0.2), (0.9, 0.5, 0.4, 0.2))
    guard = OfflineGuard.of(calibration, -1, lambda: informed)
    assert [guard.stops(range(n)) for n in (8, 15, 16)] == [False, False, True]
    informed = False
    assert [guard.stops(range(n)) for n in (0, 7, 8)] == [False, False, True]
    assert guard.warning(2)


@pytest.mark.parametrize(
    ("stop_at", "informed", "tokens", "stops"),
    [(-1, False, 0, True), (-1, True, 0, False), (0, False, 500, False), (5, False, 5, True)],
)
def test_an_answer_that_is_not_worth_showing_is_not_shown_unless_asked_for(
    stop_at: int, informed: bool, tokens: int, stops: bool
) -> None:
    calibration = _calibrated((0.9, 0.9), (0.4, 0.2, 0.1))
    assert OfflineGuard.of(calibration, stop_at, lambda: informed).stops(range(tokens)) == stops
    from_before = _calibrated((0.9,))
    assert not OfflineGuard.of(from_before, -1, lambda: informed).stops(range(0))


def test_a_setting_that_there_is_not_is_refused_by_name() -> None:
    wrong: dict[str, Any] = {"upstrem": "gpu:8000"}
    with pytest.raises(ConfigError, match="unknown setting 'upstrem'") as refused:
        EdgeClient(**wrong)
    assert refused.value.hint == "did you mean upstream?"
    with pytest.raises(ConfigError, match="unknown setting 'upstrem'"):
        ask("hi", **wrong)


def test_a_flag_that_is_no_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'temprature'") as refused:
        ClientSettings.load({"temprature": 1}, environment={})
    assert refused.value.hint == "did you mean temperature?"


async def test_an_answer_has_no_setting_of_the_client_to_itself() -> None:
    """Those were ignored without a word, like a token, or a model's name."""
    mine = ClientSettings(offline=True)
    wrong = {field.name: getattr(mine, field.name) for field in dataclasses.fields(mine)}
    for name in TurnChanges.__annotations__:
        del wrong[name]
    assert {"verifier", "upstream_model", "token", "tls_ca", "threads"} <= set(wrong)
    async with EdgeClient(mine) as client:
        for name, value in wrong.items():
            one: dict[str, Any] = {name: value}
            with pytest.raises(ConfigError, match=f"{name} is a setting of the whole client"):
                await anext(client.generate("hi", **one))
