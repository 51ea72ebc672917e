"""Weights in a file that is mapped into memory: a system that runs short takes back what it has read
of the file, where it would have to kill a process that holds as much in memory of its own."""

from __future__ import annotations

import mmap
import sys
import tempfile
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor, nn

from moa.process.memory import give_back_free_memory


def move_to_file(module: nn.Module, folder: Path) -> None:
    """Move the weights of a module into a file without a name in this folder, which is gone when no
    weight is mapped from it any more. Those that share memory go on sharing it."""
    if sys.platform == "win32":  # the folder could not be renamed while the file is there
        return
    moved: dict[tuple[object, ...], Tensor] = {}
    # Not where temporary files are by default: that may itself be in memory.
    with tempfile.TemporaryFile(dir=folder) as file:
        for parameter in module.parameters():
            if not parameter.numel():
                continue
            place = parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype
            if place not in moved:
                moved[place] = _moved(parameter.detach(), file)
            parameter.data = moved[place]
    give_back_free_memory()


def _moved(weight: Tensor, file: IO[bytes]) -> Tensor:
    """Write a weight to the end of a file, and return it mapped."""
    content = weight.contiguous().reshape(-1).view(torch.uint8).numpy()
    file.write(b"\0" * (-file.tell() % mmap.ALLOCATIONGRANULARITY))
    start = file.tell()
    file.write(content.data)
    file.flush()
    # Torch wants arrays that can be written to: what is written would be a copy.
    mapped = np.memmap(file, np.uint8, "c", start, content.shape)
    return torch.from_numpy(mapped).view(weight.dtype).view(weight.shape)
