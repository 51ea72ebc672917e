"""Which bundle goes with which target: a small model of the same tokenizer with any, a drafter that
reads the target's state with its own alone."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from cloud_verifier.engine.contract import ModelFacts
from cloud_verifier.sessions.channel import answer_hello
from edge_client.client import hello_of
from moa.manifest import Manifest
from moa.wire import Code, Refusal
from moa.wire.limits import Limits
from tests.edge.kit import device


def manifest_of(kind: Literal["moa", "independent", "states"]) -> Manifest:
    manifest = device().bundle.manifest
    records = None if kind == "independent" else manifest.records
    return replace(manifest, drafter=replace(manifest.drafter, kind=kind), records=records)


def facts(manifest: Manifest, *, target: str, tokenizer: str = "") -> ModelFacts:
    """What a verifier serves."""
    return ModelFacts(
        target=target,
        tokenizer=tokenizer or manifest.tokenizer.hash,
        drafter="",
        vocab_size=manifest.vocabulary.target,
        eos_ids=(2,),
        slots=1,
        capacity=64,
        records=None,
        computes="v2-computes",
    )


def test_a_small_models_bundle_goes_with_every_target_of_its_tokenizer() -> None:
    """What a replica computes is told in the welcome all the same: no turn goes on with another
    (`tests/edge/turn/test_machine.py`)."""
    manifest = manifest_of("independent")
    hello = hello_of(manifest)
    for target in (manifest.target.facts.weights_id, "v2-the-same-model-in-a-gguf-file"):
        served = facts(manifest, target=target)
        welcome = answer_hello(hello, served, Limits(), max_context=60, instance="i")
        assert (welcome.target, welcome.computes) == (target, "v2-computes")
        assert not welcome.notices
    served = facts(manifest, target="v2-other", tokenizer="another")
    with pytest.raises(Refusal, match="another tokenizer") as refused:
        answer_hello(hello, served, Limits(), max_context=60, instance="i")
    assert refused.value.code == Code.TOKENIZER


@pytest.mark.parametrize("kind", ["moa", "states"])
def test_what_reads_a_targets_state_goes_with_that_target_alone(
    kind: Literal["moa", "states"],
) -> None:
    manifest = manifest_of(kind)
    own = manifest.target.facts.weights_id
    assert own
    hello = hello_of(manifest)
    answer_hello(hello, facts(manifest, target=own), Limits(), max_context=60, instance="i")
    with pytest.raises(Refusal, match="another target") as refused:
        answer_hello(
            hello, facts(manifest, target="v2-other"), Limits(), max_context=60, instance="i"
        )
    assert refused.value.code == Code.TARGET
