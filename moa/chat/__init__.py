"""What a conversation is to a model: its template, rendered where it can do no harm."""
