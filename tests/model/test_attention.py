"""Tree attention in the library's own forward; its masks are shown by the tests of the decoders."""

from __future__ import annotations

import pytest
import torch

from moa.model.library import ATTENTION
from tests.close import assert_rounded
from tests.model.trees import reference
from tests.tiny import FAMILIES, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_this_attention_still_runs_plainly(family: str) -> None:
    model = tiny(family)
    model.set_attn_implementation(ATTENTION)
    ids = torch.arange(4, 34).reshape(2, 15)
    with torch.no_grad():
        assert_rounded(model(ids).logits, reference(family)(ids).logits)
