"""The scenarios of `python -m benchmarks.server_load`, one idea a module, and what they share."""
