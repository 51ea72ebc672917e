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
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|bos|>", "<|end|>", "<|pad|>")


def test_decoding_gives_the_text_back(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [example.prompt + example.answer for example in islice(examples("heldout", 3), 64)]
    texts += islice(stdlib_text("heldout"), 3)
    texts += ["", " ", "a  b ,  c .\n\n\t", "Straße 東京 🙂 e\u0301 ½ ٣", "don 't , isn 't ."]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_digit_is_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("x=1234")[-4:] == ["1", "2", "3", "4"]


def test_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|bos|>Be kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n"
    full = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "Ho"}], tokenize=False)
    assert full == f"{rendered}Ho<|end|>\n"


def test_a_prompt_is_a_prefix_of_its_chat_in_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for example in islice(examples("train", 0), 32):
        chat = messages(example)
        prompt, full = (
            tokenizer.encode(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=start))
            for part, start in ((chat[:1], True), (chat, False))
        )
        assert full[: len(prompt)] == prompt
