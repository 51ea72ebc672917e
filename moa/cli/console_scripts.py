"""Where the installed commands begin: with as few imports as possible, for Ctrl-C would show a
traceback of them."""

import signal
from functools import partial


def _run(module: str, main: str) -> object:
    """Import a command and run it. Until its own code takes over, and after that, Ctrl-C just ends
    the process, without a traceback; unless whoever started it wants Ctrl-C to be ignored."""
    is_not_ignored = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_not_ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from importlib import import_module

    run = getattr(import_module(module), main)
    if is_not_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    finally:
        if is_not_ignored:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


moa_edge = partial(_run, "moa.cli.moa_edge", "main")
# Its own module cannot be imported where torch is missing.
moa_train = partial(_run, "moa.cli.moa_edge", "train")
moa_export = partial(_run, "export.cli", "main")
cloud_verifier = partial(_run, "cloud_verifier.cli", "main")
edge_client = partial(_run, "edge_client.cli", "main")
