"""The verifier as an OpenAI-compatible endpoint, for clients without a drafter; and the operator's
page."""
