"""A real pair, measured: `python -m benchmarks.real VERB`."""
