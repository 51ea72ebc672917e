"""Text to ids and back: tokenizer, chat templates, streaming text."""
