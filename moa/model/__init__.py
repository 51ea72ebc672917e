"""The models in torch: the target and its slots, the drafter's attentions, and what both need to
load and run."""
