"""The thread that owns the model: what runs next, forwards, verdicts, activation records"""
