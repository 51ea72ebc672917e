"""The device: ONNX drafter, decoding, transport, offline mode, and synchronisation. Never imports
torch."""

from edge_client.client import Answer, EdgeClient, ask
from edge_client.conversation import Conversation
from edge_client.device import Device
from edge_client.events import Adopt, Confirm, Done, Event, Link, Notice, Prompt, Retract, Token
from edge_client.settings import ClientSettings

__all__ = [
    "Adopt",
    "Answer",
    "ClientSettings",
    "Confirm",
    "Conversation",
    "Device",
    "Done",
    "EdgeClient",
    "Event",
    "Link",
    "Notice",
    "Prompt",
    "Retract",
    "Token",
    "ask",
]
