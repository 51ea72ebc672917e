"""Experiments with drafters: tokens a round, speed on one machine, right answers of drafters and of
the target."""
