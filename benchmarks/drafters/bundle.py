"""The bundle of an independent drafter, for a device that drafts without the target's records."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.baselines.independent import as_llama
from benchmarks.baselines.registry import load_independent
from export.build import BuildSettings, build
from export.embedded import embedded_prompts
from moa.model.loading import load_tokenizer, locate


def build_independent(weights: Path, target: str, out: Path) -> Path:
    """Export trained weights as a plain causal model of its own, with the target's tokenizer, embedding and head."""
    with tempfile.TemporaryDirectory() as folder:
        model, facts = load_independent(weights, target)
        as_llama(model, facts.max_positions, facts.eos_ids).save_pretrained(folder)
        load_tokenizer(locate(target)).save_pretrained(folder)
        build(
            BuildSettings(
                target=target,
                drafter=f"independent:{folder}",
                out=out,
                variants=("cpu-int8",),
                prompts=embedded_prompts(16)[0],
                time_steps=False,
            ),
            say=lambda text: print(text, file=sys.stderr),
        )
    return out
