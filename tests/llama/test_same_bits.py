"""How many tokens a call may have, by what a file's matrices are stored in, and by the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from moa.gguf.reader import GgufHead, StoredBlocks
from moa.llama.same_bits import CallSizes, few_tokens

X86 = "CPU : AVX2 = 1 | FMA = 1 | REPACK = 1 |"
AMX = "CPU : AVX2 = 1 | AVX512 = 1 | AMX_INT8 = 1 |"
ARM = "CPU : NEON = 1 | DOTPROD = 1 |"


def head(*kinds: str) -> GgufHead:
    """A file with a matrix of each kind, and a norm."""
    tensors = [StoredBlocks("output_norm.weight", "F32", (256,), 0, 1024)]
    for number, kind in enumerate(kinds):
        tensors.append(StoredBlocks(f"blk.{number}.attn_q.weight", kind, (256, 256), 0, 1))
    return GgufHead(Path("some.gguf"), {}, tuple(tensors))


def sizes(
    *kinds: str, processor: str = X86, value_type: str = "bf16", threads: int = 1
) -> CallSizes | None:
    return few_tokens(
        head(*kinds), processor, kv_type="f16", value_type=value_type, threads=threads
    )


@pytest.mark.parametrize(
    ("kinds", "unit", "batch"),
    [
        (["Q4_K", "Q6_K"], 1, 3),
        (["Q5_K", "Q6_K"], 1, 7),
        (["Q8_0"], 1, 128),
        (["F16"], 2, 128),
        (["Q5_K", "F32"], 2, 6),
        (["Q4_K", "F16"], 2, 2),
    ],
)
def test_a_call_has_as_many_tokens_as_all_kernels_take_alike(
    kinds: list[str], unit: int, batch: int
) -> None:
    found = sizes(*kinds)
    assert found is not None
    assert (found.unit, found.batch) == (unit, batch)
    assert found.longest == min(batch, 56)


@pytest.mark.parametrize("processor", [AMX, ARM])
def test_of_another_processor_nothing_is_known(processor: str) -> None:
    assert sizes("Q4_K", processor=processor) is None


def test_of_another_type_nothing_is_known() -> None:
    assert sizes("Q4_K", "IQ1_M") is None


def test_attention_that_is_cut_by_threads_gets_two_tokens_of_each_sequence() -> None:
    for value_type, threads, unit in (("f16", 1, 1), ("f16", 2, 2), ("bf16", 2, 1)):
        found = sizes("Q6_K", value_type=value_type, threads=threads)
        assert found is not None
        assert found.unit == unit


def test_a_table_of_which_rows_are_looked_up_is_no_matrix() -> None:
    table = StoredBlocks("token_embd.weight", "IQ1_M", (256, 1000), 0, 1)
    own_head = StoredBlocks("output.weight", "Q6_K", (256, 1000), 0, 1)
    plain = head("Q6_K")
    for more, known in (((table, own_head), True), ((table,), False)):
        whole = GgufHead(plain.path, {}, (*plain.tensors, *more))
        found = few_tokens(whole, X86, kv_type="f16", value_type="bf16", threads=1)
        assert (found is not None) == known
