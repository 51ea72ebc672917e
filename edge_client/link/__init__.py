"""The connection to the verifier."""
