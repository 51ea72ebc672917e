"""Small programs that show one thing each; a test runs them beside the embedded pair."""
