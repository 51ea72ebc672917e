"""The bundle of an independent drafter, for a device that drafts without the target's records.

python -m benchmarks.drafters.bundle OUT/independent --out DIR
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.baselines.independent import as_llama
from benchmarks.baselines.registry import load_independent
from export.build import BuildSettings, build
from export.embedded import embedded_prompts
from moa.demo import paths
from moa.errors import run_cli
from moa.model.loading import load_tokenizer, locate


def build_independent(weights: Path, target: str, out: Path, *, variant: str = "cpu-int8", prompts: int = 16) -> Path:
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
                variants=(variant,),
                prompts=embedded_prompts(prompts)[0],
                time_steps=False,
            ),
            say=lambda text: print(text, file=sys.stderr),
        )
    return out


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, metavar="DIR", help="an independent drafter as it was trained")
    parser.add_argument("--target", default=str(paths().target), metavar="ID_OR_DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    build_independent(options.weights, options.target, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.drafters.bundle", main))
