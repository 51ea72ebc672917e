"""What all experiments share: options, progress, tables, prompts, verifiers, clients, and checks of the text."""
