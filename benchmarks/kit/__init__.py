"""Common parts of the experiments: options, progress, tables, prompts, verifiers, clients, and
checks of the text."""
