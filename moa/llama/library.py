"""The part of llama.cpp's C interface that a target needs, in any build of its shared library.

Every build will do: that of `llama-cpp-python`, of another package of wheels, of the system, or a
build of one's own with the backend of one's card. llama.cpp keeps its functions, and now and then
inserts fields into the two structures of parameters. So their layouts are known for some versions,
and the library's own defaults show which one it has; a library of an unknown version is refused,
and never called with a structure that it would misread.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_size_t,
    c_uint32,
    c_void_p,
)
from ctypes.util import find_library
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from moa.errors import UsageError
from moa.llama.ctrl_c import KeptCtrlC
from moa.target.identity import file_id

_INSTALL = "install the extra `gguf`, or name a build of llama.cpp with --llama-library"
_ROOM = 512
"""Bytes behind the known fields: a library that knows more fields must not write behind ours."""
_PATIENCE = 10.0
"""Seconds that another machine may take to accept a connection."""
_ERROR = 4
"""GGML_LOG_LEVEL_ERROR."""
_MOST_COMPLAINTS = 8
_MOST_THREADS = 512
"""GGML_MAX_N_THREADS, the size of the mask in `ggml_threadpool_params`."""
LOG_CALLBACK = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
PROGRESS_CALLBACK = ctypes.CFUNCTYPE(c_bool, c_float, c_void_p)


class Override(Structure):
    """`llama_model_tensor_buft_override`: where tensors whose name matches a pattern go."""

    _fields_ = [("pattern", c_char_p), ("buffer_type", c_void_p)]


class Batch(Structure):
    """`llama_batch`."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


class _ThreadPoolParameters(Structure):
    """`ggml_threadpool_params`."""

    _fields_ = [
        ("cpumask", c_bool * _MOST_THREADS),
        ("n_threads", c_int32),
        ("prio", c_int32),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    ]


_Fields = list[tuple[str, Any]]
_MODEL: _Fields = [
    ("devices", c_void_p),
    ("tensor_buft_overrides", c_void_p),
    ("n_gpu_layers", c_int32),
    ("split_mode", c_int32),
    ("load_mode", c_int32),
    ("lazy_mode", c_int32),
    ("main_gpu", c_int32),
    ("tensor_split", c_void_p),
    ("progress_callback", c_void_p),
    ("progress_callback_user_data", c_void_p),
    ("kv_overrides", c_void_p),
    ("vocab_only", c_bool),
    ("check_tensors", c_bool),
    ("use_extra_bufts", c_bool),
    ("no_host", c_bool),
    ("no_alloc", c_bool),
    ("load_mtp", c_bool),
]
_CONTEXT_HEAD: _Fields = [
    ("n_ctx", c_uint32),
    ("n_batch", c_uint32),
    ("n_ubatch", c_uint32),
    ("n_seq_max", c_uint32),
    ("n_rs_seq", c_uint32),
    ("n_outputs_max", c_uint32),
    ("n_outputs_max_per_seq", c_uint32),
    ("n_threads", c_int32),
    ("n_threads_batch", c_int32),
    ("ctx_type", c_int32),
    ("rope_scaling_type", c_int32),
    ("pooling_type", c_int32),
    ("attention_type", c_int32),
    ("flash_attn_type", c_int32),
    ("rope_freq_base", c_float),
    ("rope_freq_scale", c_float),
    ("yarn_ext_factor", c_float),
    ("yarn_attn_factor", c_float),
    ("yarn_beta_fast", c_float),
    ("yarn_beta_slow", c_float),
    ("yarn_orig_ctx", c_uint32),
    ("defrag_thold", c_float),
    ("cb_eval", c_void_p),
    ("cb_eval_user_data", c_void_p),
    ("type_k", c_int32),
    ("type_v", c_int32),
]
_CONTEXT_TAIL: _Fields = [
    ("abort_callback", c_void_p),
    ("abort_callback_data", c_void_p),
    ("embeddings", c_bool),
    ("offload_kqv", c_bool),
    ("no_perf", c_bool),
    ("op_offload", c_bool),
    ("swa_full", c_bool),
    ("kv_unified", c_bool),
    ("samplers", c_void_p),
    ("n_samplers", c_size_t),
    ("ctx_other", c_void_p),
]


def _structure(name: str, fields: _Fields) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": [*fields, ("_room", c_int8 * _ROOM)]})


_ModelParameters = _structure("llama_model_params", _MODEL)
_CONTEXTS = {
    "2026-09": _structure("llama_context_params", _CONTEXT_HEAD + _CONTEXT_TAIL),
    "2026-10": _structure(
        "llama_context_params", [*_CONTEXT_HEAD, ("moe_cache_size", c_size_t), *_CONTEXT_TAIL]
    ),
}
"""By when llama.cpp took a layout up, the newest last."""
_MODEL_DEFAULTS: Mapping[str, Any] = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "progress_callback": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
}
_CONTEXT_DEFAULTS: Mapping[str, Any] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_threads": 4,
    "n_threads_batch": 4,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "yarn_beta_slow": -1.0,
    "cb_eval": None,
    "type_k": 1,
    "type_v": 1,
    "abort_callback": None,
    "abort_callback_data": None,
    "embeddings": False,
    "offload_kqv": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}
"""What `llama_*_default_params` return: where a field lies elsewhere, others show it."""

_PROTOTYPES: Mapping[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LOG_CALLBACK, c_void_p]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_model_n_ctx_train": (c_int32, [c_void_p]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_model_n_layer": (c_int32, [c_void_p]),
    "llama_model_n_head": (c_int32, [c_void_p]),
    "llama_model_n_head_kv": (c_int32, [c_void_p]),
    "llama_model_n_swa": (c_int32, [c_void_p]),
    "llama_model_has_encoder": (c_bool, [c_void_p]),
    "llama_model_has_decoder": (c_bool, [c_void_p]),
    "llama_model_is_recurrent": (c_bool, [c_void_p]),
    "llama_model_is_hybrid": (c_bool, [c_void_p]),
    "llama_model_is_diffusion": (c_bool, [c_void_p]),
    "llama_model_desc": (c_int32, [c_void_p, c_char_p, c_size_t]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    "llama_vocab_bos": (c_int32, [c_void_p]),
    "llama_tokenize": (
        c_int32,
        [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool],
    ),
    "llama_free": (None, [c_void_p]),
    "llama_n_ctx": (c_uint32, [c_void_p]),
    "llama_n_batch": (c_uint32, [c_void_p]),
    "llama_n_ubatch": (c_uint32, [c_void_p]),
    "llama_n_seq_max": (c_uint32, [c_void_p]),
    "llama_n_rs_seq": (c_uint32, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_pos_max": (c_int32, [c_void_p, c_int32]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_synchronize": (None, [c_void_p]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_get_logits_ith": (c_void_p, [c_void_p, c_int32]),
    "llama_attach_threadpool": (None, [c_void_p, c_void_p, c_void_p]),
    "llama_supports_gpu_offload": (c_bool, []),
    "llama_print_system_info": (c_char_p, []),
    "llama_state_seq_get_size_ext": (c_size_t, [c_void_p, c_int32, c_uint32]),
    "llama_state_seq_get_data_ext": (
        c_size_t,
        [c_void_p, c_char_p, c_size_t, c_int32, c_uint32],
    ),
    "llama_state_seq_set_data_ext": (
        c_size_t,
        [c_void_p, c_char_p, c_size_t, c_int32, c_uint32],
    ),
    "ggml_backend_cpu_buffer_type": (c_void_p, []),
    "ggml_backend_reg_by_name": (c_void_p, [c_char_p]),
    "ggml_backend_register": (None, [c_void_p]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_dev_get": (c_void_p, [c_size_t]),
    "ggml_backend_dev_type": (c_int32, [c_void_p]),
    "ggml_backend_dev_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_description": (c_char_p, [c_void_p]),
    "ggml_backend_dev_memory": (None, [c_void_p, POINTER(c_size_t), POINTER(c_size_t)]),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
}
_CALLING_BACK = (
    "llama_backend_init",
    "llama_model_load_from_file",
    "llama_model_free",
    "llama_init_from_model",
    "llama_free",
    "llama_decode",
    "llama_synchronize",
    "llama_get_logits_ith",
    "llama_tokenize",
    "llama_memory_clear",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_state_seq_get_size_ext",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_set_data_ext",
    "ggml_backend_register",
)
"""Functions that may write to the log, which is a function of ours, or say how far they are."""
CPU = 0
"""A device's type, as `ggml_backend_dev_type` says it."""
GPU = 1
INTEGRATED_GPU = 2


def _loaded(path: Path) -> Any:
    """Load a shared library, and declare to ctypes the types of its functions, but of those that
    take structures; a `UsageError` for one that is not llama.cpp's."""
    try:
        functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(functions, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise UsageError(f"cannot use the library {path}: {error}", hint=_INSTALL) from None
    return functions


class Library:
    """A shared library of llama.cpp. Its functions are attributes of `c`. Made by `load` alone."""

    def __init__(self, path: Path) -> None:
        """Load the library, declare its functions' types to ctypes, and find out which layout its
        structures have; a `UsageError` for a library that cannot be used."""
        # An OpenMP build waits for work in a loop unless it is told not to, before it is loaded:
        # two such processes on the same cores are ten times as slow as one.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        self.c: Any = _loaded(path)
        self.path = path
        self.model_parameters = self._agreeing(
            "llama_model_default_params", [_ModelParameters], _MODEL_DEFAULTS
        )
        self.context_parameters = self._agreeing(
            "llama_context_default_params", list(_CONTEXTS.values()), _CONTEXT_DEFAULTS
        )
        load = self.c.llama_model_load_from_file
        load.restype = c_void_p
        load.argtypes = [c_char_p, self.model_parameters]
        init = self.c.llama_init_from_model
        init.restype = c_void_p
        init.argtypes = [c_void_p, self.context_parameters]
        self._servers: set[str] = set()
        """Those that were added: a process keeps them for good."""
        self.complaints: list[str] = []
        """What llama.cpp has complained of since this was last emptied; the cause comes first."""
        self._log = LOG_CALLBACK(self._logged)
        self.c.llama_log_set(self._log, None)
        ctrl_c = KeptCtrlC()
        for name in _CALLING_BACK:
            setattr(self.c, name, ctrl_c.keeping(getattr(self.c, name)))
        self._ctrl_c = ctrl_c
        self._goes_on = PROGRESS_CALLBACK(lambda *_: not ctrl_c.has_come)
        self._load_backends(path.parent)
        self.c.llama_backend_init()

    def _load_backends(self, folder: Path) -> None:
        """Load backends that are libraries of their own from this folder, where the library's own
        file is; a build without them finds none."""
        if hasattr(self.c, "ggml_backend_load_all_from_path"):
            load = self.c.ggml_backend_load_all_from_path
            load.argtypes = [c_char_p]
            load.restype = None
            self._ctrl_c.keeping(load)(str(folder).encode())

    def load_model(self, path: Path, parameters: Any) -> int:
        """Load a model by these parameters, until Ctrl-C. Returns llama.cpp's handle of it; 0 where
        it cannot, which `complaints` explain."""
        self.complaints.clear()
        parameters.progress_callback = ctypes.cast(self._goes_on, c_void_p)
        return self.c.llama_model_load_from_file(str(path).encode(), parameters) or 0

    def _agreeing(
        self, function: str, layouts: list[type[Structure]], defaults: Mapping[str, Any]
    ) -> type[Structure]:
        """Return which of these `layouts` of a structure the library uses: the one in which the
        defaults that its `function` returns are what they are known to be. A `UsageError` if none
        is."""
        for layout in layouts:
            getattr(self.c, function).restype = layout
            found = getattr(self.c, function)()
            if all(getattr(found, name) == value for name, value in defaults.items()):
                return layout
        raise UsageError(
            f"{self.path} is of a version of llama.cpp that this program does not know",
            hint=_INSTALL,
        )

    def _logged(self, level: int, text: bytes, _: object) -> None:
        message = text.decode(errors="replace").strip()
        if level == _ERROR and message and len(self.complaints) < _MOST_COMPLAINTS:
            self.complaints.append(message)

    def thread_pool(self, threads: int) -> tuple[int, Any]:
        """Make threads for the forwards on the processor that sleep while they wait, and leave
        the cores to others. Returns llama.cpp's handle of them and the function that
        frees them; 0 and None where the library has no CPU backend to make them."""
        device = next((each for kind, each in self.devices() if kind == CPU), None)
        if device is None:
            return 0, None
        registry = self.c.ggml_backend_dev_backend_reg(device)
        new = self.c.ggml_backend_reg_get_proc_address(registry, b"ggml_threadpool_new")
        free = self.c.ggml_backend_reg_get_proc_address(registry, b"ggml_threadpool_free")
        if not new or not free:
            return 0, None
        parameters = _ThreadPoolParameters(n_threads=threads, prio=0, poll=0)
        make = ctypes.CFUNCTYPE(c_void_p, POINTER(_ThreadPoolParameters))(new)
        pool = make(ctypes.byref(parameters))
        return pool or 0, ctypes.CFUNCTYPE(None, c_void_p)(free)

    def add_servers(self, addresses: Sequence[str]) -> None:
        """Have layers computed by these machines, too, each `HOST:PORT` of llama.cpp's
        `rpc-server`."""
        # A backend is asked for its own functions by their names.
        backend = self.c.ggml_backend_reg_by_name(b"RPC")
        add = None
        if backend:
            add = self.c.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_add_server")
        if not add:
            raise UsageError(
                f"--rpc: the build of llama.cpp in {self.path} has no RPC backend",
                hint="build it with GGML_RPC=ON, and name it with --llama-library",
            )
        for address in addresses:
            if address in self._servers:
                continue
            _check_that_one_listens(address)  # llama.cpp ends the process where none does
            registry = ctypes.CFUNCTYPE(c_void_p, c_char_p)(add)(address.encode())
            if not registry:
                raise UsageError(f"--rpc: no rpc-server answers at {address}")
            self.c.ggml_backend_register(registry)
            self._servers.add(address)

    @cached_property
    def build(self) -> str:
        """Tells this build from others: a hash of its files. A build's backends may be files of their
        own beside it."""
        beside = {each.resolve() for each in self.path.parent.glob("*ggml*") if each.is_file()}
        files = {path.name: file_id(path) for path in {self.path, *beside}}
        return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()

    @property
    def instructions(self) -> str:
        """Which of the processor's instructions its backends use."""
        return (self.c.llama_print_system_info() or b"").decode(errors="replace").strip()

    @property
    def has_card(self) -> bool:
        """Whether a backend has found a graphics card."""
        return any(kind in (GPU, INTEGRATED_GPU) for kind, _ in self.devices())

    def card_memory(self) -> int:
        """Free bytes in the memory of all graphics cards together."""
        total = 0
        for kind, handle in self.devices():
            if kind in (GPU, INTEGRATED_GPU):
                free = c_size_t()
                whole = c_size_t()
                self.c.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(whole))
                total += free.value
        return total

    def devices(self) -> list[tuple[int, int]]:
        """Type and handle of every device."""
        handles = [self.c.ggml_backend_dev_get(i) for i in range(self.c.ggml_backend_dev_count())]
        return [(self.c.ggml_backend_dev_type(handle), handle) for handle in handles]


def _check_that_one_listens(address: str) -> None:
    """A `UsageError` unless something takes connections at `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"--rpc: {address} is no HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except OSError as error:
        raise UsageError(
            f"--rpc: no rpc-server answers at {address}: {error}",
            hint="start llama.cpp's rpc-server there, of the same version as the library here",
        ) from None


@cache
def load(path: Path) -> Library:
    """The library at a path. A process keeps it for good: llama.cpp calls back into it."""
    return Library(path)


def find(given: str = "") -> Path:
    """Find llama.cpp's shared library: the `given` file, that of an installed Python package, or
    the system's; a `UsageError` if there is none."""
    if given:
        if not Path(given).is_file():
            raise UsageError(f"no library at {given}: there is no such file")
        return Path(given).resolve()
    name = {"darwin": "libllama.dylib", "win32": "llama.dll"}.get(sys.platform, "libllama.so")
    for package, pattern in (("llama_cpp", f"lib/{name}"), ("xllamacpp", "xllamacpp.*")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            found = [path for path in Path(folder).glob(pattern) if path.suffix != ".pyi"]
            if found:
                return found[0]
    if system := find_library("llama"):
        return Path(system)
    raise UsageError("llama.cpp is not installed, which a GGUF file needs", hint=_INSTALL)
