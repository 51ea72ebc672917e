"""Experiments of the verifier: load, readers that it holds, its forward beside bare arithmetic, several workers."""
