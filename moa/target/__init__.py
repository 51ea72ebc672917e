"""What verifies: the contract of a target, and the targets behind it."""
