"""Training a drafter beside its frozen target, and the plain language-model training that made the
demo's target."""
