"""The embedded demo pair: a tiny target and draft model with the corpus and tokenizer they are trained on."""
