"""Experiments: baselines from the field under the same engine, and the measurements behind the
tables in `docs/`."""
