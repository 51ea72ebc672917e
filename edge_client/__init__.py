"""The device: ONNX drafter, decode loop, transport, offline mode, and synchronisation. Never imports torch."""

from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import Adopt, Confirm, Done, Event, Link, Notice, Prompt, Retract, Token
from edge_client.settings import ClientSettings

__all__ = [
    "Adopt",
    "ClientSettings",
    "Confirm",
    "Device",
    "Done",
    "EdgeClient",
    "Event",
    "Link",
    "Notice",
    "Prompt",
    "Retract",
    "Token",
]
