"""Text that grows token by token and is withdrawn, and prompts by template."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edge_client.text.chat import ChatLog
from edge_client.text.codec import TextCodec
from moa.errors import BundleError, UsageError
from moa.target.identity import tokenizer_hash
from moa.text_stream import TextStream
from moa.tokenizer_file import tokenizer_errors


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    """Byte-level: one token a byte, so that characters come in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return TextCodec(
        tmp_path / "tokenizer.json", template, bos_id=tokenizer.token_to_id("<bos>"), eos_ids=(257,)
    )


def chat_ids(codec: TextCodec, messages: Sequence[Mapping[str, str]]) -> list[int]:
    return codec.plain(codec.chat(messages))


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("opening", [[], [SYSTEM], [SYSTEM, SYSTEM]])
def test_a_full_context_loses_its_oldest_turns_and_not_with_every_turn(
    codec: TextCodec, opening: list[dict[str, str]]
) -> None:
    chat = ChatLog(codec)
    said = list(opening)
    room = 400
    trims = []
    for turn in range(40):
        said.append({"role": "user", "content": f"question {turn}"})
        ids, left_out = chat.ask(said, room)
        trims.append(left_out)
        sent = opening + said[len(opening) + sum(trims) :]
        assert ids == chat_ids(codec, sent)
        assert len(ids) <= room
        assert sent[len(opening)]["role"] == "user"
        assert chat.messages == said, "nothing is lost for those who keep it"
        said.append({"role": "assistant", "content": "an answer"})
        chat.answered([*ids, *codec.plain("an answer")], "an answer")
    assert 4 < sum(map(bool, trims)) < 12
    other = [*opening, {"role": "user", "content": "something else"}]
    assert chat.ask(other, room) == (chat_ids(codec, other), 0)


def test_one_message_that_is_too_long_is_kept_whole(codec: TextCodec) -> None:
    said = [{"role": "user", "content": "long" * 20}]
    assert ChatLog(codec).ask(said, 10) == (chat_ids(codec, said), 0)


def shown(stream: TextStream, ids: Sequence[int]) -> str:
    return "".join(stream.add(token) for token in ids)


@given(
    text=st.text(alphabet="abé世", max_size=12),
    stop=st.lists(st.text(alphabet="abé世", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(0, 20), max_size=3),
)
@example(text="baa", stop=["a", "baa"], cuts=[])
@example(text="ends with Th", stop=["The"], cuts=[])
@example(text="one\n\ntwo", stop=["\n\n", "two"], cuts=[9])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stop_strings_and_taking_back(
    codec: TextCodec, text: str, stop: list[str], cuts: list[int]
) -> None:
    ids = codec.encode(text)
    stream = TextStream(codec, tuple(stop))
    seen = shown(stream, ids)
    assert len(ids) == len(text.encode()), "characters come in pieces"
    for cut in cuts:
        kept = min(cut, len(ids))
        seen = seen[: stream.cut(kept)] + shown(stream, ids[kept:])
        assert seen == stream.text
    # The first stop string to be complete ends the text, even where a longer one began before it.
    ends = (end for end in range(len(text) + 1) if any(word in text[:end] for word in stop))
    seen_by_then = text[: next(ends, 0)]
    expected = min(
        (text[: text.index(word)] for word in stop if word in seen_by_then), key=len, default=text
    )
    assert seen + stream.flush() == stream.text == expected


def test_an_unfinished_character_is_left_out_in_the_end(codec: TextCodec) -> None:
    stream = TextStream(codec)
    for token in codec.encode("ok世")[:-1]:
        stream.add(token)
    assert stream.text == "ok"
    assert stream.flush() == ""


def test_the_template_has_the_special_tokens_and_what_is_not_text_is_refused(
    codec: TextCodec,
) -> None:
    ids = chat_ids(codec, [{"role": "user", "content": "hi"}])
    assert ids[0] == 256
    assert codec.decode(ids) == "[user]hi[assistant]"
    for refused in (
        codec.encode,
        lambda text: chat_ids(codec, [{"role": "user", "content": text}]),
    ):
        with pytest.raises(UsageError, match="not text"):
            refused("a\udcffb")


def test_what_is_no_template(codec: TextCodec, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% for %}")
    for name in ("broken.jinja", "missing.jinja"):
        with pytest.raises(BundleError, match="is not a chat template"):
            chat_ids(
                TextCodec(tmp_path / "tokenizer.json", tmp_path / name),
                [{"role": "user", "content": "hi"}],
            )
    plain = TextCodec(tmp_path / "tokenizer.json")
    assert not plain.can_chat
    with pytest.raises(UsageError, match=r"(?s)no chat template.*/v1/completions"):
        chat_ids(plain, [{"role": "user", "content": "hi"}])


def test_a_rendering_starts_no_thread(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a timer must first have run: on a busy machine each question waited for that."""
    question = [{"role": "user", "content": "hi"}]
    first = chat_ids(codec, question)  # the process is started, and a thread watches it

    def start(thread: threading.Thread) -> None:
        raise AssertionError(f"{thread.name} was started")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert chat_ids(codec, question) == first


def test_the_end_token_of_a_template_is_the_one_it_means(codec: TextCodec, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ eos_token }}")
    files = tmp_path / "tokenizer.json", tmp_path / "chat.jinja"
    user = [{"role": "user", "content": "hi"}]
    named = TextCodec(*files, eos_ids=(256, 257), special_tokens={"eos_token": "<eos>"})
    assert chat_ids(named, user) == [257]
    assert chat_ids(TextCodec(*files, eos_ids=(257, 256)), user) == [257], (
        "else the first, not the smallest"
    )


def hostile(folder: Path, **parts: object) -> Path:
    """The fixture's tokenizer with other parts."""
    content = json.loads((folder / "tokenizer.json").read_text()) | parts
    (folder / "hostile.json").write_text(json.dumps(content))
    return folder / "hostile.json"


@pytest.mark.parametrize(
    "parts",
    [
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
        },
        {
            "normalizer": {"type": "NFKC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"Regex": "\\d"},
                        "behavior": "Isolated",
                        "invert": False,
                    },
                    {
                        "type": "ByteLevel",
                        "add_prefix_space": False,
                        "trim_offsets": True,
                        "use_regex": True,
                    },
                ],
            },
        },
    ],
    ids=["Llama 2", "NFKC and bytes"],
)
def test_tokenizers_of_known_models_are_read(
    codec: TextCodec, tmp_path: Path, parts: dict[str, object]
) -> None:
    assert TextCodec(hostile(tmp_path, **parts)).encode("a b")


def steps(part: str, *inner: dict[str, object]) -> dict[str, object]:
    plural = {"pre_tokenizer": "pretokenizers"}.get(part, part + "s")
    return {part: {"type": "Sequence", plural: list(inner)}}


BOMB = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 100_000}
HALF = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 9}  # each alone is allowed
TWICE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TRIE = base64.b64encode(struct.pack("<I", 4) + b"trie" + b"x" * 100 + b"\0").decode()


@pytest.mark.parametrize(
    "parts",
    [
        *(steps(part, BOMB) for part in ("normalizer", "decoder")),
        *(steps(part, HALF, HALF) for part in ("normalizer", "pre_tokenizer", "decoder")),
        steps("pre_tokenizer", *[TWICE] * 7),
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": TRIE}},
        steps("normalizer", *[{"type": "NFC"}] * 65),
    ],
    ids=[
        "bomb",
        "bomb in the decoder",
        "half",
        "half before",
        "half in the decoder",
        "doubled",
        "charsmap",
        "many",
    ],
)
def test_a_tokenizer_that_makes_much_of_little(
    codec: TextCodec, tmp_path: Path, parts: dict[str, object]
) -> None:
    with pytest.raises(BundleError, match=r"makes \d+ times as much text|has more than 64 steps"):
        TextCodec(hostile(tmp_path, **parts))


def test_a_file_that_cuts_and_pads_does_neither_here(codec: TextCodec, tmp_path: Path) -> None:
    """Such files are on hubs, and have the same identity as those without."""
    file = tmp_path / "tokenizer.json"
    plain = json.loads(file.read_text())
    text = "First question, and a long one. What is 17 plus 25?"
    for direction in ("Left", "Right"):
        cut = {"direction": direction, "max_length": 12, "strategy": "LongestFirst", "stride": 0}
        pad = {
            "strategy": {"Fixed": 200},
            "direction": direction,
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        }
        content = json.dumps({**plain, "truncation": cut, "padding": pad})
        file.write_text(content)
        assert tokenizer_hash(content) == tokenizer_hash(json.dumps(plain))
        other = TextCodec(file, None, bos_id=None, eos_ids=(257,))
        assert other.encode(text) == codec.encode(text)[-len(text) :]
        assert len(Tokenizer.from_str(content).encode(text).ids) != len(text), "it would be obeyed"


def test_a_token_that_is_a_text(codec: TextCodec, tmp_path: Path) -> None:
    piece = "y" * 5000
    model = {"type": "WordLevel", "vocab": {piece: 0}, "unk_token": piece}
    with pytest.raises(BundleError, match="5000 characters of 1 tokens"):
        TextCodec(hostile(tmp_path, model=model, decoder=None)).decode([0])


def test_what_the_library_dies_of_is_one_line(codec: TextCodec, tmp_path: Path) -> None:
    class PanicException(BaseException):
        """As pyo3 raises it: no `Exception`."""

    with pytest.raises(BundleError, match="cannot encode this: boom"), tokenizer_errors("encode"):
        raise PanicException("boom")
    with pytest.raises(KeyboardInterrupt), tokenizer_errors("encode"):
        raise KeyboardInterrupt
    with pytest.raises(BundleError, match="is not a tokenizer"):
        TextCodec(hostile(tmp_path, decoder={"type": "Nothing"}))
    (tmp_path / "deep.json").write_text('{"decoder": ' + "[" * 100_000)
    with pytest.raises(BundleError, match="is not a tokenizer"):
        TextCodec(tmp_path / "deep.json")


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match="is not a tokenizer"):
        TextCodec(tmp_path / "tokenizer.json")
    with pytest.raises(BundleError, match="no tokenizer"):
        TextCodec(tmp_path / "missing.json")
