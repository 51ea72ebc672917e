"""The OpenAI-shaped API over anything that answers: requests, response shapes, streams, access. No torch."""
