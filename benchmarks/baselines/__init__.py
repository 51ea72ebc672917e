"""Baseline drafters, trained and run in the same way: EAGLE-2, EAGLE-3.1, an independent model."""
