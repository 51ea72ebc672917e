"""A target in a GGUF file: llama.cpp's library computes, in this process."""
