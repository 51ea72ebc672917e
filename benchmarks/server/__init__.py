"""Experiments with the verifier: load, capacity in readers, its forward against bare arithmetic."""
