"""The tokenizer loses nothing, splits digits, and renders chats."""

from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from demo.corpus import examples, messages, stdlib_text
from demo.tokenizer import SPECIAL_TOKENS, VOCABULARY, train


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    train(folder, characters=800_000)
    loaded = AutoTokenizer.from_pretrained(folder)  # type: ignore[no-untyped-call]
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_size_and_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|bos|>",
        "<|end|>",
        "<|pad|>",
    )


def test_decoding_gives_the_text_back(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [example.prompt + example.answer for example in islice(examples("heldout", 3), 64)]
    texts += islice(stdlib_text("heldout"), 3)
    texts += ["", " ", "a  b ,  c .\n\n\t", "Straße 東京 🙂 e\u0301 ½ ٣", "don 't , isn 't ."]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_digit_is_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("x=1234")[-4:] == ["1", "2", "3", "4"]


def test_a_prompt_is_a_prefix_of_its_chat_in_text_and_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    def rendered(chat: list[dict[str, str]], start: bool) -> str:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=start))

    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    asked = "<|bos|>Be kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n"
    assert rendered(chat, True) == asked
    assert rendered([*chat, {"role": "assistant", "content": "Ho"}], False) == f"{asked}Ho<|end|>\n"
    for example in islice(examples("train", 0), 32):
        chat = messages(example)
        prompt, full = (
            tokenizer.encode(text) for text in (rendered(chat[:1], True), rendered(chat, False))
        )
        assert full[: len(prompt)] == prompt
