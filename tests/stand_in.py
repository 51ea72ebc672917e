"""A stand-in for an accelerator: tensors that say they are on another device, and compute on the
CPU.

What a real accelerator refuses is refused here too: an operation over two devices, `.numpy()`
without a copy to the CPU, and an attention whose mask has another dtype than its query (some
kernels misread such a mask without a word).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "meta"
"""Its name: the only device type besides the CPU that every build of torch knows."""
_COPIES = {"_to_copy", "copy_"}
_INDEXED = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
"""They take indices from the CPU, on accelerators too."""


class Elsewhere(Tensor):
    """A tensor on the stand-in."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        found: Elsewhere = made
        return found

    def __init__(self, inner: Tensor) -> None:
        """All is done in `__new__`."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    leaves = tree_flatten((args, kwargs))[0]
    here = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Elsewhere) and x.ndim]
    there = [x for x in leaves if isinstance(x, Elsewhere)]
    if (
        here
        and there
        and name not in _COPIES
        and not (name in _INDEXED and isinstance(args[0], Elsewhere))
    ):
        raise AssertionError(
            f"{func} over two devices: {[tuple(x.shape) for x in here]} are on the CPU"
        )
    wanted = kwargs.get("device")
    elsewhere = bool(there) if wanted is None else torch.device(wanted).type == DEVICE
    if name == "copy_":
        elsewhere = isinstance(args[0], Elsewhere)
    kwargs = {
        key: "cpu" if key == "device" and value is not None else value
        for key, value in kwargs.items()
    }
    plain = tree_map(lambda x: x.inner if isinstance(x, Elsewhere) else x, (args, kwargs))
    out = func(*plain[0], **plain[1])
    if not elsewhere:
        return out
    known = {id(x.inner): x for x in there}  # what is changed in place stays the same tensor

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, Elsewhere):
            return x
        return known[id(x)] if id(x) in known else Elsewhere(x)

    return tree_map(placed, out)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = kwargs.get("device")
        if (
            func in (torch.tensor, torch.as_tensor)
            and wanted is not None
            and torch.device(wanted).type == DEVICE
        ):
            return Elsewhere(
                func(*args, **kwargs | {"device": "cpu"})
            )  # made below what a dispatch mode sees
        if func is functional.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if mask is not None and mask.dtype not in (torch.bool, args[0].dtype):
                raise AssertionError(f"a mask of {mask.dtype} for a query of {args[0].dtype}")
        return func(*args, **kwargs)


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Within it `DEVICE` is an accelerator, without autocast."""
    enabled = torch.is_autocast_enabled
    autocast = torch.autocast

    def is_enabled(device_type: str = "cpu") -> bool:
        return device_type != DEVICE and enabled(device_type)

    def no_autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return (
            contextlib.nullcontext()
            if device_type == DEVICE
            else autocast(device_type, *args, **kwargs)
        )

    off = mock.patch.multiple(torch, is_autocast_enabled=is_enabled, autocast=no_autocast)
    # Tensors of this kind cannot be made in inference mode: no_grad in its place.
    grad = mock.patch.multiple(
        torch.inference_mode, __enter__=torch.no_grad.__enter__, __exit__=torch.no_grad.__exit__
    )
    with off, grad, _Functions(), _Dispatch():
        yield


def moved(module: nn.Module) -> nn.Module:
    """The module, with its weights on the stand-in; weights that were one stay one."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                made.setdefault(
                    id(value), nn.Parameter(Elsewhere(value.detach()), value.requires_grad)
                )
                part._parameters[name] = made[id(value)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = made.setdefault(id(buffer), Elsewhere(buffer))
    return module
