"""Output: views of an answer on a terminal or in a pipe."""
