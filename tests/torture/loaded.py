"""What the forked processes of `server.py` need: imported, and loaded, once."""

from __future__ import annotations

import torch

import edge_client.cli.chat
import edge_client.cli.use  # noqa: F401
from cloud_verifier.model import load
from cloud_verifier.settings import Settings

torch.set_num_threads(1)  # others would not survive the fork
SERVED = load(Settings())
