"""Text that grows token by token, is taken back, and prompts by template."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edge_client.text.codec import TextCodec, TextStream
from moa.errors import BundleError, UsageError


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    """Byte-level: one token a byte, so that characters come in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{{ bos_token }}{% for m in messages %}"
        "{% if m['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
        "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return TextCodec(tmp_path / "tokenizer.json", template, bos_id=tokenizer.token_to_id("<bos>"), eos_ids=(257,))


def test_pieces_join_to_the_text(codec: TextCodec) -> None:
    text = "Grüße, 世界! 👋 done"
    stream = TextStream(codec)
    pieces = [stream.add(token) for token in codec.encode(text)]
    assert "".join(pieces) == stream.text == text
    assert "" in pieces  # bytes of an unfinished character


def test_taking_back_and_going_on(codec: TextCodec) -> None:
    ids = codec.encode("naïve 世界 café")
    rng = random.Random(0)
    for _ in range(50):
        stream = TextStream(codec)
        for token in ids[: rng.randrange(1, len(ids))]:
            stream.add(token)
        kept = rng.randrange(len(ids))
        kept = min(kept, len(stream._ids))
        assert stream.cut(kept) == len(stream.text)
        for token in ids[kept:]:
            stream.add(token)
        assert stream.text == "naïve 世界 café"


def test_an_unfinished_character_comes_out_in_the_end(codec: TextCodec) -> None:
    stream = TextStream(codec)
    for token in codec.encode("ok世")[:-1]:
        stream.add(token)
    assert stream.text == "ok"
    assert stream.flush() == "\ufffd"


def test_the_template_has_the_special_tokens(codec: TextCodec) -> None:
    ids = codec.encode_chat([{"role": "user", "content": "hi"}])
    assert ids[0] == 256
    assert codec.decode(ids) == "[user]hi[assistant]"


def test_a_template_that_refuses_is_a_clear_line(codec: TextCodec) -> None:
    with pytest.raises(UsageError, match="no such role"):
        codec.encode_chat([{"role": "bad", "content": ""}])


def test_what_is_no_template(codec: TextCodec, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% for %}")
    for name in ("broken.jinja", "missing.jinja"):
        with pytest.raises(BundleError, match="is not a chat template"):
            TextCodec(tmp_path / "tokenizer.json", tmp_path / name).encode_chat([{"role": "user", "content": "hi"}])


def test_without_a_template(codec: TextCodec, tmp_path: Path) -> None:
    plain = TextCodec(tmp_path / "tokenizer.json")
    assert not plain.can_chat
    with pytest.raises(UsageError, match="no chat template"):
        plain.encode_chat([{"role": "user", "content": "hi"}])


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match="is not a tokenizer"):
        TextCodec(tmp_path / "tokenizer.json")
    with pytest.raises(BundleError, match="no tokenizer"):
        TextCodec(tmp_path / "missing.json")
