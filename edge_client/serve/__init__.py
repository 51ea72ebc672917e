"""The device as an endpoint: OpenAI-shaped routes and a chat page over one `EdgeClient`. No torch."""
