"""Tools of the commands: comparisons of answers, an emulated network, the web app."""
