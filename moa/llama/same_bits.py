"""In which calls of llama.cpp a token gets the same bits, whatever else is in the call.

llama.cpp picks its kernels by how many tokens a call has, and each kernel adds in an order of its
own. So calls are cut such that all tokens of a model run through the same kernels. Which numbers of
tokens those are depends on how the file's matrices are stored, and on the processor:

* On x86, K-quants have a kernel for single tokens, which a call of up to seven tokens runs for each
  of them, and another one from eight tokens on. Q4_K and Q2_K may be laid out anew in memory; then
  the other one begins at four. A call of few tokens costs as much a token as a call of one: so plain
  decoding is as fast as llama.cpp's own, and a draft costs what its tokens cost.
* On x86, matrices of floats have one kernel for a single token, and another one from two tokens on.
  So a single token is filled up to two.
* Elsewhere, and with AMX, nobody has looked. Multiples of eight tokens add in one order in every
  build that was tried, and a single token is filled up to eight.

The attention of one token over a long context is cut into as many pieces as there are threads, and
that of 64 tokens or more into tiles; but neither where keys and values are of different types. So
values are kept in bfloat16 beside keys in float16. Their sums are in float32 then, where llama.cpp
has sums of float16 values in float16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moa.gguf.reader import GgufHead

_LONGEST = 56
"""Most tokens of a sequence in a call: attention of 64 and more may add in another order."""
BATCH = 128
"""Most tokens of a call on a processor. More are no faster there, and logits of all of them have
their memory."""
_FLOATS = frozenset({"F32", "F16", "BF16"})
_MOST_TOKENS = {
    "Q8_0": BATCH,
    "Q4_0": 7,
    "Q4_1": 7,
    "Q5_0": 7,
    "Q5_1": 7,
    "Q2_K": 3,
    "Q3_K": 7,
    "Q4_K": 3,
    "Q5_K": 7,
    "Q6_K": 7,
    "IQ4_XS": 7,
}
"""Most tokens of a call that run through the kernel of a single token, on x86, by the type of a
matrix; types that were not tried are missing."""
_CUT_ATTENTION = "f16"
"""Keys and values whose attention is cut by threads, if both are of this type."""


@dataclass(frozen=True)
class CallSizes:
    """How many tokens a call may have."""

    unit: int
    """Every sequence brings a multiple of it."""
    longest: int
    """Most tokens of a sequence."""
    batch: int
    """Most tokens of all sequences together."""
    worth_a_call: int
    """A sequence is filled up by at most so many tokens to save another one a call."""


EIGHTS = CallSizes(unit=8, longest=_LONGEST, batch=BATCH, worth_a_call=8)
"""Where single tokens have kernels of which nothing is known."""


def few_tokens(
    head: GgufHead, instructions: str, *, kv_type: str, value_type: str, threads: int
) -> CallSizes | None:
    """The sizes of calls in which every token runs through the kernel of few tokens; None where it
    is not known which kernels there are. `instructions` are those of the build's kernels, as
    llama.cpp names them."""
    if "AVX2 = 1" not in instructions or "AMX_INT8 = 1" in instructions:
        return None
    kinds = _kinds_of_matrices(head)
    if not kinds <= _FLOATS | _MOST_TOKENS.keys():
        return None
    attention_is_cut = kv_type == value_type == _CUT_ATTENTION and threads > 1
    unit = 2 if kinds & _FLOATS or attention_is_cut else 1
    batch = min((_MOST_TOKENS[kind] for kind in kinds - _FLOATS), default=BATCH)
    batch -= batch % unit
    return CallSizes(
        unit=unit,
        longest=min(batch, _LONGEST),
        batch=batch,
        # Where tokens of a call cost as much as in calls of their own, filling up saves nothing.
        worth_a_call=0 if batch < BATCH else 1,
    )


def _kinds_of_matrices(head: GgufHead) -> set[str]:
    """The types of all tensors that tokens are multiplied with."""
    has_own_head = any(tensor.name == "output.weight" for tensor in head.tensors)
    kinds = set()
    for tensor in head.tensors:
        if has_own_head and tensor.name == "token_embd.weight":
            continue  # rows of it are looked up, and nothing else
        if len(tensor.shape) > 1 and math.prod(tensor.shape[1:]) > 1:
            kinds.add(tensor.kind)
    return kinds
