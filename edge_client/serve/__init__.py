"""The device as an endpoint: OpenAI-compatible routes and a chat page over one `EdgeClient`. No
torch."""
