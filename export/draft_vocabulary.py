"""Which tokens of a large vocabulary are drafted: the head takes most of a step, and most text uses
few tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from export.source import Source
from moa.errors import UsageError


def count_files(tokenizer_json: bytes, files: Sequence[Path]) -> Counter[int]:
    """Returns how often each token occurs in these text files."""
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    tokenizer.no_truncation()  # whole files are counted, and nothing but them
    tokenizer.no_padding()
    counts: Counter[int] = Counter()
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the vocabulary text {file}: {error}") from None
        counts.update(tokenizer.encode(text, add_special_tokens=False).ids)
    return counts


def most_frequent(counts: Counter[int], size: int, source: Source) -> NDArray[np.int64]:
    """Returns the target's ids of the `size` tokens to keep, sorted. End tokens and special tokens
    are kept first, then the most frequent."""
    whole = source.vocabulary
    if not 1 <= size <= whole:
        raise UsageError(f"--draft-vocab must be 1..{whole} (the target's vocabulary), not {size}")
    tokenizer = Tokenizer.from_str(source.tokenizer.json.decode())
    special = {
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    }
    by_use = [token for token, _ in counts.most_common()]
    # The most important first; a dict keeps each once.
    order = dict.fromkeys([*source.facts.eos_ids, *sorted(special), *by_use, *range(whole)])
    chosen = [token for token in order if token < whole][:size]
    return np.array(sorted(chosen), np.int64)
