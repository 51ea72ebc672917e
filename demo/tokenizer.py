"""The demo pair's tokenizer: byte-level BPE with single digits and a chat template."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import examples, stdlib_text

VOCABULARY = 4096
"""Entries, special tokens included."""

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Special tokens in the order of their ids, from zero."""

CHAT_TEMPLATE = (
    "<|bos|>"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '<|end|>\\n' }}"
    "{% else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""A system message is before the first turn without a marker, because all of the few special tokens
are trained."""


def _up_to(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text
        characters -= len(text)


def train(out: Path, characters: int = 6_000_000) -> PreTrainedTokenizerFast:
    """Train on about so many characters, half exercises and half Python code, and save to the
    folder `out`."""
    tokenizer = Tokenizer(models.BPE())
    # A digit is always its own token, so that numbers look the same everywhere.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    exercises = (f"{example.prompt}\n{example.answer}\n" for example in examples("train", seed=0))
    texts = chain(_up_to(exercises, characters // 2), _up_to(stdlib_text("train"), characters // 2))
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(out)
    return fast
