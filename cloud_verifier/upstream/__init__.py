"""A verifier whose target runs in somebody else's engine, behind an HTTP interface. No torch."""
