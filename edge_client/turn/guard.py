"""How far the device may go on alone, as it was calibrated for this drafter when its bundle was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OfflineGuard:
    """Lengths of unverified text at which to warn and to stop; 0 is never."""

    warn_at: int = 64
    stop_at: int = 0
    _warned: bool = False

    def warning(self, offline: int) -> str:
        """What to tell the user when the unverified text has this many tokens; once for each time offline."""
        if not self.warn_at or offline < self.warn_at or self._warned:
            return ""
        self._warned = True
        return f"{offline} tokens without the verifier: from here on expect mistakes"

    def stops(self, offline: int) -> bool:
        """Whether the unverified text must not grow."""
        return bool(self.stop_at) and offline >= self.stop_at

    def reset(self) -> None:
        """The verifier has seen everything."""
        self._warned = False
