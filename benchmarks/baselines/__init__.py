"""Baseline drafters, trained and run in the same way: EAGLE-2, EAGLE-3.1, PARD, an independent model."""
