"""The verifier as an OpenAI-shaped endpoint, for clients without a device; and the operator's page."""
