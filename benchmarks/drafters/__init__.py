"""Experiments of the drafters: tokens won a round, speed on one machine, right answers, alone and of the target."""
