"""What a person sees: views of an answer on a terminal or in a pipe."""
