"""How the embedded pair was made: exercises, corpus, tokenizer and training plan. Not in the wheel"""
