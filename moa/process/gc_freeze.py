"""Python's collector of cyclic garbage, in a process that serves for weeks."""

import gc


def leave_out_what_is_loaded() -> None:
    """Call this once everything is loaded: modules and models stay for good, so nobody need look at them again.

    Among hundreds of thousands of such objects a full collection stops every session for a quarter of a second. Python
    therefore puts it off until a quarter as many others have piled up, which takes hours, and looks like a leak.
    Without them it takes milliseconds, and comes by itself every few minutes.
    """
    gc.freeze()
    gc.collect()
