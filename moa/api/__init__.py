"""The OpenAI-compatible API over any `Answerer`: requests, response shapes, streams, access. No
torch."""
