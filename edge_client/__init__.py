"""The device: ONNX drafter, decoding, transport, offline mode, and synchronisation. Never imports
torch."""

from edge_client.client import Answer, EdgeClient, ask
from edge_client.conversation import Conversation
from edge_client.device import Device
from edge_client.events import (
    Adopt,
    Confirm,
    Done,
    Event,
    Link,
    Notice,
    Progress,
    Prompt,
    Retract,
    Token,
)
from edge_client.settings import ClientSettings
from moa.grammar.spec import Grammar

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
    "Grammar",
    "Link",
    "Notice",
    "Progress",
    "Prompt",
    "Retract",
    "Token",
    "ask",
]
