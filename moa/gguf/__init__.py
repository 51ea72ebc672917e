"""Files in GGUF, llama.cpp's format: what they say of their model, without its weights. No torch."""
