"""Kits that tests and benchmarks share: tiny models, a verifier of this process, clients that follow a script.

Nothing here is shipped, and nothing here imports tests or benchmarks."""
