"""The chat page in a real Chromium: a link cut in mid-answer, reloads, no network at all, sizes,
accessibility.

`MOA_PICTURES=docs/pictures` writes the documentation's pictures anew.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.clients.conftest import CHROMIUM, MODEL, PATIENCE, Device, visits

pytest.importorskip("playwright.sync_api", reason="needs `make clients`")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.filterwarnings("default"),
]
STORY = "Make up a little story: the hero is Ben, the animal is a cat, the place is a forest."
SLOW = 0.15
"""Seconds a forward, so that an answer has a middle."""
Open = Callable[..., Any]


@pytest.fixture
def opened(chromium: Any, device: Device) -> Iterator[Open]:
    """Opens the page. Other tests use the same device: it gets its link back, and what this test
    has asked is no longer checked."""
    streams: set[str | None] = set()
    with visits(
        chromium, set(), "ERR_INTERNET_DISCONNECTED", "Cross-Origin-Opener-Policy"
    ) as visit:

        def page(
            width: int = 1280, height: int = 720, path: str = "/", base: str = "", **how: Any
        ) -> Any:
            made = visit((base or device.address) + path, "online", width, height, **how)
            made.on("response", lambda response: streams.add(response.headers.get("x-request-id")))
            return made

        yield page
    device.pause = 0.0
    device.connect()
    device.forget(filter(None, streams))


def answered(device: Device, question: str) -> str:
    """The target's answer."""
    with openai.OpenAI(base_url=f"{device.address}/v1", api_key="any", timeout=PATIENCE) as client:
        asked: Any = [{"role": "user", "content": question}]
        return str(
            client.chat.completions.create(model=MODEL, messages=asked).choices[0].message.content
        )


@pytest.fixture(scope="module")
def truth(device: Device) -> str:
    """The target's answer to the question."""
    return answered(device, STORY)


def ask(page: Any, text: str = STORY) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def written(page: Any, characters: int, what: str = ".assistant .body") -> None:
    """Wait for so much text."""
    page.wait_for_function(
        "([what, least]) => (document.querySelector(what)?.textContent ?? '').length >= least",
        arg=[what, characters],
    )


def cut_in_mid_answer(opened: Open, device: Device) -> Any:
    """A page whose answer lost its link, and goes on with text that is not verified."""
    page = opened()
    device.pause = SLOW
    ask(page)
    written(page, 12)
    page.click("#cut-switch")
    written(page, 20, ".provisional")
    return page


def complete(page: Any) -> str:
    """The answer, when it is all there."""
    page.wait_for_function(
        "() => document.querySelector('#status').textContent === 'The answer has ended'"
    )
    page.wait_for_function("() => !document.querySelector('.retracted')")
    return str(page.text_content(".assistant .body"))


def tile(page: Any, name: str) -> str:
    """What the tile of this name shows, once that is a figure."""
    shown = page.wait_for_function(
        """(name) => {
          const terms = [...document.querySelectorAll("#figures dt")];
          const figure = terms.find((term) => term.textContent === name).nextElementSibling.textContent;
          return /[0-9]/.test(figure) && figure;
        }""",
        arg=name,
    )
    return str(shown.json_value())


def picture(page: Any, name: str, animations: Any = "disabled") -> None:
    """`allow` animations where something is seen only while one runs, as text that is struck out."""
    if folder := os.environ.get("MOA_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", animations=animations)


def test_an_answer_whose_link_is_cut_goes_on_and_is_corrected(
    opened: Open, device: Device, truth: str
) -> None:
    page = cut_in_mid_answer(opened, device)
    note = page.text_content(".assistant .note")
    assert "not verified yet" in note or "by this device alone" in note  # it may have ended by now
    picture(page, "chat-page")
    wrong = not truth.startswith(page.text_content(".assistant .body"))
    device.pause = 0.0
    page.click("#cut-switch")
    if wrong:
        page.wait_for_selector(".retracted")
        picture(page, "chat-page-corrected", "allow")
    assert complete(page) == truth
    assert page.query_selector(".provisional") is None
    assert page.text_content(".assistant .note") == ""
    assert float(tile(page, "Tokens a forward")) >= 1
    assert tile(page, "Round trip").endswith("ms")
    assert tile(page, "Traffic").endswith("B/s")


def test_asking_goes_on_without_the_verifier_and_is_checked_when_it_is_back(
    opened: Open, device: Device
) -> None:
    page = opened()
    page.click("#cut-switch")
    page.wait_for_selector("#link[data-state=offline]")
    began = time.monotonic()
    for number in range(10):
        ask(page, f"What is {number + 20} + 13?")
        page.wait_for_function(
            "(count) => document.querySelectorAll('.assistant').length === count"
            " && !document.querySelector('#send').disabled",
            arg=number + 1,
        )
    seconds = time.monotonic() - began
    notes = page.locator(".assistant .note").all_text_contents()
    assert set(notes) == {"written by this device alone: waiting for the verifier's check"}
    assert set(page.locator(".assistant .who").all_text_contents()) == {
        "This device, for demo model"
    }
    page.click("#cut-switch")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.assistant .note')].every((note) => !note.textContent)"
    )
    print(f"\nten questions in {seconds:.0f} s")
    assert seconds < 60
    assert page.locator(".assistant .body").first.text_content() == answered(
        device, "What is 20 + 13?"
    )


QUESTIONS = (
    "Write a short story about Ada, a fox and a garden.",
    STORY,
    "Write a short story about Tom, a dog and a river.",
)
"""Their answers depend on the texts of the answers before, also on those of the drafter."""
NOTES = "[...document.querySelectorAll('.assistant .note')].map((note) => note.textContent)"


def conversation_without_a_cut(device: Device) -> list[str]:
    """The target's answers to the three questions, each with the target's own before it."""
    answers: list[str] = []
    messages: list[Any] = []
    with openai.OpenAI(base_url=f"{device.address}/v1", api_key="any", timeout=PATIENCE) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            whole = client.chat.completions.create(
                model=MODEL,
                messages=messages,
                extra_body={"moa": {"mode": "hold", "patience": PATIENCE}},
            )
            answers.append(str(whole.choices[0].message.content))
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_answers_behind_a_corrected_one_are_asked_again_and_survive_another_cut_and_a_reload(
    opened: Open, device: Device
) -> None:
    truths = conversation_without_a_cut(device)
    page = opened()
    page.click("#cut-switch")
    page.wait_for_selector("#link[data-state=offline]")
    for number, question in enumerate(QUESTIONS):
        ask(page, question)
        page.wait_for_function(
            "(count) => document.querySelectorAll('.assistant').length === count"
            " && !document.querySelector('#send').disabled",
            arg=number + 1,
        )
    offline = page.locator(".assistant .body").all_text_contents()
    assert offline[0] != truths[0], "else nothing is corrected"

    device.pause = 0.5
    page.click("#cut-switch")
    again = "asked again: an answer before it was corrected"
    waiting = "an answer before it was corrected: waiting to be asked again"
    page.wait_for_function(f"(words) => {NOTES}[1].startsWith(words)", arg=again)
    assert page.evaluate(NOTES)[2] == waiting, "it is not shown as verified"
    page.click("#cut-switch")
    page.wait_for_function(
        f"(words) => {NOTES}[2] === words && !document.querySelector('#send').disabled", arg=waiting
    )
    page.reload()
    page.wait_for_selector("#link[data-state=offline]")
    assert page.evaluate(NOTES)[2] == waiting, "it is kept"
    assert page.locator(".assistant .body").all_text_contents()[::2] == [truths[0], offline[2]]
    assert page.locator(".assistant .body").last.locator(".provisional").text_content()

    device.pause = 0.0
    page.click("#cut-switch")
    page.wait_for_function(f"() => {NOTES}.every((note) => !note)")
    page.wait_for_function("() => !document.querySelector('.retracted')")
    assert page.locator(".assistant .body").all_text_contents() == truths
    assert page.query_selector(".provisional") is None


def test_struck_out_text_goes_from_every_message_without_an_animation_too(opened: Open) -> None:
    page = opened(reduced_motion="reduce")
    page.evaluate("""async () => {
        const { ChatView } = await import("./chat.js");
        const node = (id, parent) => ({ id, parent, role: "assistant", text: "kept", at: 1 });
        const nodes = { a: node("a", ""), b: node("b", "a") };
        const view = new ChatView(document.querySelector("#messages"), {});
        view.show({ nodes, leaf: "b" });
        view.draw(nodes.a, null, "gone");
        view.draw(nodes.b, null, "gone");
    }""")
    assert page.locator(".retracted").count() == 2
    page.wait_for_function("() => !document.querySelector('.retracted')", timeout=20_000)


def test_a_message_is_copied_over_plain_http_too(opened: Open, device: Device, truth: str) -> None:
    page = opened(path="/", base=device.address.replace("127.0.0.1", "[::ffff:127.0.0.1]"))
    assert not page.evaluate("isSecureContext"), "as any address of a local network"
    ask(page)
    assert complete(page) == truth
    page.click(".assistant .tools button")
    page.wait_for_function(
        "() => document.querySelector('.assistant .tools button').textContent === 'Copied ✓'"
    )
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt") == truth


def shown(page: Any, text: str, settled: int | None = None) -> Any:
    """An answer of this text, as the page shows it."""
    page.evaluate(
        """async ([text, settled]) => {
            const { ChatView } = await import("./chat.js");
            const parent = document.querySelector("#messages");
            const node = { id: "a", parent: "", role: "assistant", text, settled, at: 1 };
            new ChatView(parent, {}).show({ nodes: { a: node }, leaf: "a" });
        }""",
        [text, len(text) if settled is None else settled],
    )
    return page.locator("#messages .body")


def test_a_code_block_has_its_language_and_a_button_that_copies_it(opened: Open) -> None:
    page = opened()
    shown(page, "```python\nx = 1\n```")
    assert page.text_content(".code-bar") == "pythonCopy"


def test_formulas_are_mathml_and_nothing_else(opened: Open) -> None:
    page = opened()
    text = r"$\frac{1}{2}$ and \[\sum_{k=1}^n k\]"
    body = shown(page, text, settled=len(r"$\frac{1}{2}$ "))
    assert body.locator("math").count() == 2
    assert body.locator("mfrac").count() == 1
    assert body.locator(".math.provisional").count() == 1
    hostile = [
        r"\href{javascript:alert(1)}{x}",
        r"\includegraphics{https://evil.example/x.png}",
        r"\ref{a}",
        r"\begin{equation}\label{prompt}x\end{equation}",
        r"\class{switch}{x}",
        r"\def\a{\a\a}\a",
        "{" * 900,
    ]
    for tex in hostile:
        for source in (f"${tex}$", f"$${tex}$$"):
            body = shown(page, source)
            assert body.inner_text() == source, "it stays as it was written"
            assert body.locator("math, a, img, [id]").count() == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_wide_content_scrolls_inside_itself(opened: Open, width: int) -> None:
    page = opened(width, 844)
    table = (
        "| name | value of the thing | a note that is long |\n|---|---:|---|\n| alpha | 1,000,000 | "
        + "n" * 80
        + " |"
    )
    shown(page, f"$$x = {' + '.join('abcdefgh' * 5)}$$\n\n```\n{'y' * 300}\n```\n\n{table}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    breaks = "[...document.querySelectorAll('th, td')].filter((cell) => cell.scrollWidth > cell.clientWidth + 1).length"
    assert page.evaluate(breaks) == 0, "no word is cut"


def test_conversations_are_renamed_deleted_and_imported_again(
    opened: Open, truth: str, tmp_path: Path
) -> None:
    page = opened()
    ask(page)
    assert complete(page) == truth
    page.on("dialog", lambda dialog: dialog.accept("A cat" if dialog.type == "prompt" else ""))
    page.click("#conversations .small")
    page.click("#conversations .actions button >> nth=0")
    page.wait_for_function("() => document.querySelector('#title').textContent === 'A cat'")
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "all.json")
    page.click("#remove-all")
    page.wait_for_function("() => !document.querySelector('#conversations li')")
    page.set_input_files("#import-file", tmp_path / "all.json")
    page.click("#conversations .open")
    assert page.text_content(".assistant .body") == truth


def test_an_answer_that_was_cut_short_is_continued(opened: Open, truth: str) -> None:
    page = opened()
    setting = (
        "(value) => { const field = document.querySelector('#max_tokens'); field.value = value; "
    )
    setting += "field.dispatchEvent(new Event('change')); }"
    page.evaluate(setting, "8")
    ask(page)
    short = complete(page)
    assert truth.startswith(short)
    assert page.text_content(".assistant .note") == "cut at 8 tokens: Continue goes on"
    page.evaluate(setting, "")
    page.click(".assistant .more")
    written(page, len(short) + 1)
    assert complete(page) == truth
    assert page.is_hidden(".assistant .more")
    page.reload()
    page.wait_for_selector(".assistant .body")
    assert page.text_content(".assistant .body") == truth


@pytest.mark.parametrize("mode", ["provisional", "hold", "keep"])
def test_a_stopped_answer_says_its_length_in_tokens_and_that_they_are_verified(
    opened: Open, device: Device, mode: str
) -> None:
    """There stood "stopped" alone; and of what mode hold had shown, that this device had written it."""
    page = opened()
    page.evaluate(
        """(mode) => {
        const field = document.querySelector("#mode");
        field.value = mode;
        field.dispatchEvent(new Event("change"));
    }""",
        mode,
    )
    device.pause = SLOW
    ask(page)
    written(page, 12)
    page.click("#stop")
    page.wait_for_function(
        "() => / tokens/.test(document.querySelector('.assistant .measured').textContent)"
    )
    text = page.text_content(".assistant .body")
    asked = {"content": text}
    count = httpx.post(f"{device.address}/tokenize", json=asked, trust_env=False).json()["count"]
    assert page.text_content(".assistant .note") == "stopped"
    assert page.text_content(".assistant .measured") == f"{count} tokens, verified"
    page.reload()
    page.wait_for_selector(".assistant .body")
    assert page.text_content(".assistant .measured") == f"{count} tokens, verified"


def test_a_stopped_answer_whose_end_is_not_verified_says_no_more_than_its_length(
    opened: Open, device: Device
) -> None:
    page = cut_in_mid_answer(opened, device)
    page.click("#stop")
    page.wait_for_function(
        "() => /^[0-9]+ tokens$/.test(document.querySelector('.assistant .measured').textContent)"
    )
    assert page.text_content(".assistant .note").startswith("stopped; ")


@pytest.mark.parametrize(("width", "height"), [(390, 844), (390, 500), (1280, 720)])
def test_a_long_message_is_edited_in_a_box_that_leaves_room(
    opened: Open, device: Device, width: int, height: int
) -> None:
    page = opened(width, height)
    device.pause = SLOW
    ask(page, "\n".join(f"line {number}" for number in range(60)))
    page.click("#stop")
    page.click(".user .tools button:has-text('Edit')")
    box = page.locator("textarea.edit").bounding_box()
    assert box["height"] <= 0.4 * height + 1
    assert box["height"] >= 72


def chunked(*choices: dict[str, Any]) -> str:
    """A stream of these choices, each with its number."""
    frames = [
        f"id: s/{number}\ndata: {json.dumps({'choices': [choice]})}\n\n"
        for number, choice in enumerate(choices, 1)
    ]
    return "".join([*frames, "id: s/99\ndata: [DONE]\n\n"])


def test_a_stream_whose_check_was_cut_short_is_read_more_and_more_rarely(
    opened: Open, device: Device
) -> None:
    """It was read each second, and the correction that it had told once was told each time."""
    page = opened()
    page.click("#cut-switch")
    page.wait_for_selector("#link[data-state=offline]")
    ask(page, QUESTIONS[0])
    page.wait_for_function(
        "() => document.querySelector('.assistant .note')?.textContent.startsWith('written by')"
    )
    told = page.text_content(".assistant .body")
    unverified = {"reason": "eos", "all_verified": False}
    end = {"delta": {}, "finish_reason": "stop", "moa": unverified}
    stream = chunked(
        {"delta": {"content": told}, "moa": {"verified": 0}},
        end,
        {"delta": {"content": "No"}, "moa": {"verified": 2, "cut": 0}},
        end,
    )
    read: list[str] = []

    def kept(route: Any) -> None:
        read.append(route.request.url)
        route.fulfill(body=stream, content_type="text/event-stream")

    status = httpx.get(f"{device.address}/moa/status", trust_env=False).json()

    def online(route: Any) -> None:
        route.fulfill(json=status | {"link": "online"})

    page.add_init_script("""addEventListener("DOMContentLoaded", () => {
        window.notices = [];
        const place = document.querySelector("#notice");
        new MutationObserver(() => notices.push(place.textContent))
            .observe(place, { childList: true });
    })""")
    page.clock.install()
    page.route("**/v1/streams/*", kept)
    page.route("**/moa/status", online)
    page.reload()
    page.wait_for_selector("#link[data-state=online]")
    for _ in range(60):
        page.clock.run_for(1000)
    assert 5 <= len(read) <= 25
    assert page.text_content(".assistant .body") == "No"
    assert page.evaluate("notices") == ["The verifier corrects an answer that was written offline"]
    told = page.text_content(".assistant .measured")
    assert told == "2 characters", "the tokens were counted of another text"
    page.unroute_all(behavior="ignoreErrors")


def test_a_stopped_answer_with_an_unverified_end_goes_on_after_its_verified_text(
    opened: Open, device: Device, truth: str
) -> None:
    page = cut_in_mid_answer(opened, device)
    page.click("#stop")
    page.wait_for_selector(".assistant .more", state="visible")
    assert "by this device alone: not checked" in page.text_content(".assistant .note")
    page.click("#cut-switch")
    page.wait_for_selector("#link[data-state=online]")
    device.pause = 0.0
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request))
    page.click(".assistant .more")
    page.wait_for_function("() => document.querySelector('.assistant .more').hidden")
    assert complete(page) == truth
    assert page.query_selector(".provisional") is None
    (body,) = [one.post_data_json for one in asked if one.url.endswith("/completions")]
    begun = body["messages"][-1]
    assert begun["role"] == "assistant"
    assert truth.startswith(begun["content"]), "nothing unverified is a part of the question"
    assert body["prediction"]["content"]


def test_an_answer_shows_that_it_is_awaited_before_its_first_word(
    opened: Open, device: Device, truth: str
) -> None:
    page = opened()
    device.pause = 3.0
    page.evaluate("""() => {
        let asked = 0;
        addEventListener("keydown", () => { asked = performance.now(); }, true);
        window.signs = [];
        new MutationObserver(() => {
            const words = document.querySelector(".assistant .note")?.textContent ?? "";
            const counted = /, ([0-9.]+) s$| for ([0-9.]+) s$/.exec(words);
            const passed = (performance.now() - asked) / 1000;
            if (counted) signs.push([Number(counted[1] ?? counted[2]), passed, words]);
        }).observe(document.querySelector("#messages"), { childList: true, subtree: true });
    }""")
    ask(page)
    page.wait_for_selector(".assistant[aria-busy=true] .caret")
    page.wait_for_function("() => signs.length")
    counted, passed, words = page.evaluate("signs[0]")
    assert passed - counted < 0.9, f"{words}, and nothing was seen before"
    device.pause = 0.0
    assert complete(page) == truth


def test_the_speed_of_an_answer_is_that_of_its_writing(opened: Open, device: Device) -> None:
    """Of 13 tokens that came within seconds, ten minutes of reading made 0.0 tokens/s."""
    page = opened()
    page.evaluate("""() => {
        addEventListener("keydown", () => { window.asked = performance.now(); }, true);
        new MutationObserver(() => {
            const box = document.querySelector(".assistant");
            const reading = /reading the prompt, \\d+/.exec(box.querySelector(".note").textContent);
            if (reading && reading[0] !== window.reading) {
                window.reading = reading[0];
                window.read = performance.now();
            }
            if (box.querySelector(".body").textContent) window.wrote = performance.now();
        }).observe(document.querySelector("#messages"), { childList: true, subtree: true });
    }""")
    device.pause = 2.5
    ask(page, "apple, pen, lamp, " * 120 + "What is 17 + 25?")
    page.wait_for_function("() => window.read && window.wrote")
    device.pause = 0.0
    complete(page)
    tokens, speed = re.findall(r"([\d.]+) tokens", page.text_content(".assistant .measured"))[:2]
    asked, read, wrote = page.evaluate("[asked, read, wrote].map((at) => at / 1000)")
    assert read - asked > 4.5, "else nothing is tried"
    # The first token comes out of the last step of the reading.
    assert float(tokens) / float(speed) < wrote - read + 3.5


SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
ADD = {
    "name": "add",
    "description": "Add two numbers",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def set_in_settings(page: Any, **values: str) -> None:
    """Type these into the settings, as a user does."""
    if page.is_visible("#open-sidebar"):
        page.click("#open-sidebar")
    page.click("#open-settings")
    for name, value in values.items():
        page.fill(f"#{name}", value)
    page.click("#settings-title")  # the field is left
    page.wait_for_function("() => document.activeElement.tagName !== 'TEXTAREA'")


@pytest.mark.parametrize("width", [390, 1280])
def test_json_by_a_schema_tools_and_min_p_are_set_in_the_settings(
    opened: Open, width: int, tmp_path: Path
) -> None:
    page = opened(width, 844)
    bodies: list[dict[str, Any]] = []

    def asked(request: Any) -> None:
        if request.url.endswith("/completions"):
            bodies.append(request.post_data_json)

    page.on("request", asked)
    set_in_settings(page, schema='{"type": "int"}', min_p="0.1")
    assert page.text_content("#schema-problem") == (
        '"int" is no type of JSON: did you mean "integer"?'
    )
    picture(page, f"page-settings-{width}")
    page.keyboard.press("Escape")
    ask(page, "What is 17 + 25?")
    page.wait_for_selector("#settings[open]")
    assert bodies == [], "nothing is sent that cannot be meant"
    page.keyboard.press("Escape")
    assert page.input_value("#prompt") == "What is 17 + 25?"
    set_in_settings(page, schema=json.dumps(SUM))
    assert page.text_content("#schema-problem") == ""
    page.keyboard.press("Escape")
    assert page.text_content("#structure") == "answers in JSON"
    ask(page, "What is 17 + 25?")
    assert isinstance(json.loads(complete(page))["sum"], int)
    assert bodies[0]["min_p"] == 0.1
    assert bodies[0]["response_format"]["json_schema"]["schema"] == SUM
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    page.click("#open-sidebar") if width < 500 else None
    page.click("#new")
    set_in_settings(page, schema="", tools=json.dumps([ADD]))
    page.select_option("#tool_choice", "required")  # the toy calls nothing by itself
    page.keyboard.press("Escape")
    assert page.text_content("#structure") == "1 tool"
    ask(page, "What is 17 + 25?")
    page.wait_for_selector(".results textarea")
    assert page.locator(".call code").text_content() == "add"
    assert page.locator(".call dt").all_text_contents() == ["a", "b"]
    picture(page, f"page-call-{width}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.fill(".results textarea", "42")
    page.click(".results button")
    page.wait_for_function("() => document.querySelectorAll('.assistant').length === 2")
    page.wait_for_function("() => document.querySelector('#stop').hidden")
    assert [body.get("tool_choice") for body in bodies[-2:]] == ["required", None]
    *_, call, result = bodies[-1]["messages"]
    assert call["tool_calls"][0]["function"]["name"] == "add"
    assert result == {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": "42",
    }
    assert page.locator(".message.tool .who").text_content() == "Result of add"
    picture(page, f"page-result-{width}")
    page.reload()
    page.wait_for_selector(".message.tool")
    assert page.locator(".call").count() == 1, "it is kept"


def test_a_reload_takes_a_running_answer_up_again(opened: Open, device: Device, truth: str) -> None:
    page = opened()
    device.pause = SLOW
    ask(page)
    written(page, 12)
    page.reload()
    assert complete(page) == truth


def test_without_any_network_the_page_opens_and_shows_what_was_said(
    opened: Open, truth: str
) -> None:
    page = opened()
    ask(page)
    assert complete(page) == truth
    page.evaluate("navigator.serviceWorker.ready.then(() => true)")
    page.wait_for_function("() => caches.keys().then((names) => names.length > 0)")
    page.context.set_offline(True)
    page.reload()
    page.wait_for_selector("#link[data-state=unreachable]")
    assert page.text_content(".assistant .body") == truth
    page.context.set_offline(False)
    page.wait_for_selector("#link[data-state=online]")


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 720)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sizes_and_accessibility(
    opened: Open, truth: str, width: int, height: int, scheme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs `make clients`"
    ).Axe()
    page = opened(width, height, color_scheme=scheme)
    ask(page)
    assert complete(page) == truth
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "nothing to scroll sideways"
    )
    for name in ("prompt", "send"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= height
    for look in ("conversation", "settings"):
        if look == "settings":
            if width < 500:
                page.click("#open-sidebar")
            page.click("#open-settings")
        found = axe.run(page).response["violations"]
        assert [
            (v["id"], v["nodes"]) for v in found if v["impact"] in ("serious", "critical")
        ] == []
        if scheme == "light" and width < 500 and look == "conversation":
            picture(page, "chat-page-narrow")


def test_two_tabs_on_one_conversation_lose_nothing(
    opened: Open, device: Device, truth: str
) -> None:
    first = opened()
    first.context.add_init_script("delete globalThis.BroadcastChannel;")  # neither hears the other
    first.reload()
    first.wait_for_selector("#link[data-state=online]")
    ask(first)
    assert complete(first) == truth
    second = first.context.new_page()
    second.goto(first.url)
    second.wait_for_selector("#link[data-state=online]")
    assert second.text_content(".assistant .body") == truth
    device.pause = SLOW / 3
    ask(first, "What is 20 + 13?")
    ask(second, "What is 11 + 12?")
    for page in (first, second):
        page.wait_for_function(
            "() => document.querySelector('#status').textContent === 'The answer has ended'"
        )
    device.pause = 0.0
    said = """async () => {
        const { Table } = await import("./store.js");
        const [one] = await new Table("moa-edge", "conversations").all();
        const texts = (role) => Object.values(one.nodes)
          .filter((node) => node.role === role).map((node) => node.text).sort();
        return [texts("user"), texts("assistant")];
    }"""
    questions, answers = first.evaluate(said)
    assert questions == sorted([STORY, "What is 20 + 13?", "What is 11 + 12?"])
    assert len(answers) == 3
    assert truth in answers
    assert all(answers)
    for page in (first, second):
        page.reload()
        # Which of the two is shown is that of the tab whose question was stored last.
        page.wait_for_function("() => /[12][/]2/.test(document.body.textContent)")


def test_another_tab_shows_an_answer_that_this_one_has_written(opened: Open) -> None:
    first = opened()
    ask(first, "What is 20 + 13?")
    complete(first)
    second = first.context.new_page()
    second.goto(first.url)
    second.wait_for_selector(".assistant .body")
    ask(first, "What is 11 + 12?")
    last = "[...document.querySelectorAll('.assistant .body')].at(1)?.textContent"
    first.wait_for_function(f"() => {last} && !document.querySelector('#send').disabled")
    second.wait_for_function(f"(text) => {last} === text", arg=first.evaluate(last))


def test_a_poisoned_store_is_told_and_the_page_opens(opened: Open, truth: str) -> None:
    page = opened()
    ask(page)
    assert complete(page) == truth
    page.evaluate("""async () => {
        const { Table } = await import("./store.js");
        const message = (id, parent) =>
          ({ id, parent, role: "user", text: "t", at: 1, state: "running" });
        const nodes = { "1": message("1", "2"), "2": message("2", "1") };
        const circle = { id: "0".repeat(8), title: "circle", system: "", leaf: "1", nodes };
        await new Table("moa-edge", "conversations").put(circle);
    }""")
    page.reload()
    page.wait_for_selector(".assistant .body")
    assert page.text_content(".assistant .body") == truth
    assert page.text_content("#notice") == "1 damaged conversation is not shown"
    assert page.locator("#conversations li").count() == 1


def test_the_service_worker_leaves_other_caches_of_the_origin_alone(
    chromium: Any, device: Device
) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{device.address}/style.css")  # of the origin, and without a service worker
    scope = f"{device.address}/"
    others = ["somebody-else-v1", f"moa-app-1 {scope}app/", f"moa-page-1 {scope}x/", "moa-page-0"]
    old = ["moa-page-1", f"moa-page-1 {scope}"]
    page.evaluate(
        """async ([others, old]) => {
            for (const name of [...others, ...old]) await caches.open(name);
            await (await caches.open("moa-page-1")).put("/", new Response("old"));
        }""",
        [others, old],
    )
    page.goto(scope)
    page.evaluate("navigator.serviceWorker.ready.then(() => true)")
    for name in old:
        page.wait_for_function("(name) => caches.has(name).then((there) => !there)", arg=name)
    assert set(page.evaluate("caches.keys()")) == {f"moa-page-2 {scope}", *others}
    context.close()


def test_a_message_of_formulas_alone_does_not_stop_the_page(opened: Open) -> None:
    page = opened()
    texts = [f"y_{{{n}}} = {'x+' * 900}z" for n in range(30)]
    body = shown(page, "\n\n".join(f"$${tex}$$" for tex in texts))
    page.wait_for_function(
        "(most) => document.querySelectorAll('#messages math').length === most",
        arg=16_000 // len(texts[10]),
    )
    assert "y_{29} = x+x+" in body.text_content(), "what is too much stays as it was written"


def test_notes_are_true_of_the_text_that_they_stand_below(opened: Open) -> None:
    page = opened()
    told = page.evaluate("""async () => {
        const { noteOf, writerOf } = await import("./chat.js");
        const node = { text: "x".repeat(500), model: "coder", verified: false, stream: "s" };
        const all = [
            { ...node, settled: 438 },
            { ...node, settled: 0 },
            { ...node, settled: 438, lost: true },
            { ...node, settled: 438, reason: "stopped" },
            { ...node, settled: 0, check: { checked: 40, of: 500 } },
            { ...node, verified: true, settled: 500, reason: "length", usage: { tokens: 64 } },
            { ...node, verified: true, settled: 500 },
        ];
        return all.map((one) => [writerOf(one), noteOf(one)]);
    }""")
    alone = "the last 62 characters were written by this device alone"
    assert [tuple(one) for one in told] == [
        ("coder, and this device", f"{alone}: waiting for the verifier's check"),
        (
            "This device, for coder",
            "written by this device alone: waiting for the verifier's check",
        ),
        ("coder, and this device", f"{alone}: not checked"),
        ("coder, and this device", f"stopped; {alone}: not checked"),
        ("This device, for coder", "checking, 40 of 500 characters"),
        ("coder", "cut at 64 tokens: Continue goes on"),
        ("coder", ""),
    ]


def figures_below(page: Any) -> tuple[int, int]:
    """Tokens of the answer, and of the context."""
    said = page.text_content(".assistant .measured")
    tokens = re.match(r"(\d+) tokens", said)
    total = re.search(r"(\d+) of \d+ tokens of context", said)
    assert tokens, said
    assert total, said
    return int(tokens[1]), int(total[1])


def test_a_check_shows_that_it_runs_and_corrects_as_it_goes(
    opened: Open, device: Device, truth: str
) -> None:
    page = opened()
    page.click("#cut-switch")
    page.wait_for_selector("#link[data-state=offline]")
    ask(page)
    page.wait_for_function(
        "() => document.querySelector('.assistant .note')?.textContent.startsWith('written by')"
    )
    page.evaluate("""() => {
        window.notes = new Set();
        const note = document.querySelector(".assistant .note");
        new MutationObserver(() => window.notes.add(note.textContent))
            .observe(note, { childList: true, characterData: true, subtree: true });
    }""")
    alone = figures_below(page)
    device.pause = SLOW
    page.click("#cut-switch")
    page.wait_for_function("() => document.querySelector('.assistant .note').textContent === ''")
    device.pause = 0.0
    page.wait_for_function("() => !document.querySelector('.retracted')")
    assert page.text_content(".assistant .body") == truth
    tokens, total = figures_below(page)
    assert total - tokens == alone[1] - alone[0], "the prompt is as long as before"
    notes = page.evaluate("[...window.notes]")
    print(f"\n{notes}")
    assert any(note.startswith(("checking, ", "the verifier is correcting")) for note in notes)
    told = page.text_content("#notice")
    assert "corrects" not in told, "that is over"
    assert "goes on" not in told


def test_a_slow_check_does_not_flicker_and_a_correction_can_be_left(
    opened: Open, device: Device
) -> None:
    page = opened(390, 844)
    page.click("#cut-switch")
    page.wait_for_selector("#link[data-state=offline]")
    ask(page, QUESTIONS[0])
    page.wait_for_function(
        "() => document.querySelector('.assistant .note')?.textContent.startsWith('written by')"
    )
    offline = page.text_content(".assistant .body")
    page.evaluate("""() => {
        window.notes = [];
        const note = document.querySelector(".assistant .note");
        new MutationObserver(() => window.notes.push(note.textContent))
            .observe(note, { childList: true, characterData: true, subtree: true });
    }""")
    device.pause = 4.0
    page.click("#cut-switch")
    page.wait_for_function("() => notes.filter((note) => note.includes('at work')).length > 1")
    device.pause = 1.0
    page.wait_for_function(
        "() => document.querySelector('.assistant .note').textContent.includes('is correcting')"
    )
    page.wait_for_function("() => !document.querySelector('.retracted')")
    page.click(".assistant .leave")  # while the text comes, where other buttons are hidden
    assert page.text_content(".assistant .note") == "written by this device alone: not checked"
    assert page.text_content(".assistant .body") == offline
    notes = page.evaluate("notes.filter((note) => note.startsWith('checking, 0 of'))")
    counted = next(at for at, note in enumerate(notes) if "; " in note)
    assert all("; " in note for note in notes[counted:]), notes


def test_a_notice_does_not_touch_the_edges_of_a_phone(opened: Open) -> None:
    page = opened(390, 844)
    page.evaluate("""() => {
        const notice = document.querySelector("#notice");
        notice.textContent = "The verifier has corrected an answer that was written offline";
        notice.hidden = false;
    }""")
    box = page.locator("#notice").bounding_box()
    assert box["x"] >= 8
    assert box["x"] + box["width"] <= 382


def test_text_files_are_attached_and_others_are_refused(opened: Open, tmp_path: Path) -> None:
    page = opened()
    (tmp_path / "a.py").write_text("x = '```'\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\0")
    page.fill("#prompt", "Explain:")
    page.set_input_files("#attach-file", [tmp_path / "a.py"])
    page.wait_for_function("() => document.querySelector('#prompt').value.includes('x = ')")
    assert page.input_value("#prompt") == "Explain:\n\na.py:\n````\nx = '```'\n````\n"
    page.set_input_files("#attach-file", [tmp_path / "b.bin"])
    reads_text = "the model reads text, so attach text (code, Markdown, CSV, JSON, logs)"
    noticed(page, f"b.bin is no text in UTF-8: {reads_text}")
    (tmp_path / "scan.pdf").write_bytes(b"%PDF-1.7\n%%EOF\n")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n" + bytes(400_000))
    (tmp_path / "letter.docx").write_bytes(b"PK\x03\x04\0")
    (tmp_path / "long.log").write_text("ä" * 200_000)  # its beginning ends within a character
    refused = ["scan.pdf", "photo.png", "letter.docx", "long.log"]
    page.set_input_files("#attach-file", [tmp_path / name for name in refused])
    noticed(
        page,
        f"scan.pdf is a PDF: {reads_text}. photo.png is a picture: {reads_text}. "
        f"letter.docx is an office document: {reads_text}. "
        "long.log has 391 kB: attach at most 256 kB, or paste a part",
    )
    assert page.input_value("#prompt").count("```") == 3, "nothing of them is in the message"


def noticed(page: Any, words: str) -> None:
    """Wait for this notice."""
    page.wait_for_function(
        "(words) => document.querySelector('#notice').textContent === words", arg=words
    )


GIVE = """([event, target, name, type, text, beside]) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([text], name, { type }));
    if (beside) transfer.setData("text/plain", beside);
    const how = { bubbles: true, cancelable: true, composed: true };
    const given = event === "paste"
        ? new ClipboardEvent(event, { ...how, clipboardData: transfer })
        : new DragEvent(event, { ...how, dataTransfer: transfer });
    return document.querySelector(target).dispatchEvent(given);
}"""
"""Gives the page a file as a drop or a paste does; returns whether the browser does what it does by
itself."""


def test_files_are_dropped_anywhere_and_pasted_into_the_message(opened: Open) -> None:
    page = opened()
    file = ["a.ts", "video/mp2t", "let x = 1;\n", ""]  # the type that browsers guess by the name
    block = "a.ts:\n```\nlet x = 1;\n```\n"
    assert not page.evaluate(GIVE, ["dragover", "#conversations", *file])
    assert page.locator("#composer.takes-files").count() == 1
    assert not page.evaluate(GIVE, ["drop", "#conversations", *file]), "the page is not left"
    page.wait_for_function("() => document.querySelector('#prompt').value.endsWith('```\\n')")
    assert page.input_value("#prompt") == block
    assert page.locator("#composer.takes-files").count() == 0
    page.fill("#prompt", "")
    assert not page.evaluate(GIVE, ["paste", "#prompt", *file])
    page.wait_for_function("() => document.querySelector('#prompt').value.endsWith('```\\n')")
    assert page.input_value("#prompt") == block
    assert not page.evaluate(GIVE, ["paste", "#prompt", "image.png", "image/png", "\0", ""])
    page.wait_for_function(
        "() => document.querySelector('#notice').textContent.startsWith('image.png is a picture: ')"
    )
    cells = ["paste", "#prompt", "image.png", "image/png", "\0", "1\t2"]
    assert page.evaluate(GIVE, cells), "text with a picture of itself is pasted as text"


def test_top_k_and_stop_texts_are_sent(opened: Open) -> None:
    page = opened()
    setting = """([id, value]) => {
        const field = document.getElementById(id);
        field.value = value;
        field.dispatchEvent(new Event("change"));
    }"""
    page.evaluate(setting, ["top_k", "5"])
    page.evaluate(setting, ["stop_texts", "END\n###"])
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is 20 + 13?")
    body = sent.value.post_data_json
    assert (body["top_k"], body["stop"]) == (5, ["END", "###"])
    complete(page)
    page.click("#open-settings")
    assert "verifier ws://127.0.0.1" in page.text_content("#about")
