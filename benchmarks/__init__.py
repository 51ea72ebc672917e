"""Experiments: baselines from the field under the same engine, and the measurements behind the
tables in `docs/`."""

from importlib.util import find_spec

if find_spec("psutil") is None:
    raise SystemExit(
        "benchmarks: psutil is not installed (pip install '.[all]' -c constraints.txt)"
    )
