"""Which leases hold a slot of the target: a slot is taken when a lease's work first runs, begins as a
copy where another has run the same prefix, and is given back. Only the model's thread uses it."""

from __future__ import annotations

from cloud_verifier.engine.draft import StreamDrafter
from cloud_verifier.engine.faults import Faults
from cloud_verifier.engine.job import Lease
from cloud_verifier.engine.records import Recorder
from cloud_verifier.metrics import Metrics
from moa.errors import FullError
from moa.target.contract import Target
from moa.target.rows import Row


class HeldSlots:
    """Gives slots of the target to leases, and takes them back."""

    def __init__(
        self,
        target: Target,
        recorder: Recorder,
        drafting: StreamDrafter,
        metrics: Metrics,
        faults: Faults,
    ) -> None:
        """Hold no slot of the target yet; `recorder` and `drafting` are told what becomes of
        each."""
        self.leases: dict[Lease, None] = {}
        """Leases that hold a slot, or did when their work last ran."""
        self._target = target
        self._cache = target.cache
        self._recorder = recorder
        self._drafting = drafting
        self._metrics = metrics
        self._faults = faults

    def claim(self, lease: Lease) -> None:
        """Give the lease, a session's claim on a KV cache, one of the target's slots. Where another
        lease has run the same beginning of a text, the slot starts with that. Raises `FullError` if
        there is no slot or no memory."""
        source = lease.share
        tokens = lease.start  # before `share` is forgotten, which it depends on
        lease.share = None
        if source is None or source.slot is None or not self._can_share(source, lease, tokens):
            lease.slot = self._cache.acquire()
        else:
            lease.slot = self._cache.share(source.slot, tokens)
            self._take_over(source, lease, tokens)
        self.leases[lease] = None
        lease.pages_held = self._cache.pages_held[lease.slot]

    def _take_over(self, source: Lease, lease: Lease, tokens: int) -> None:
        """Let the lease begin with the first tokens of `source`, whose keys and values it shares:
        with their activation records, and with what the drafter knows of them."""
        with self._faults.optional("records"):
            self._recorder.copy(source, lease, tokens)
        lease.length = tokens
        with self._faults.optional("drafting"):
            self._drafting.shared(source, lease)
        with self._faults.optional("metrics"):
            self._metrics.shared_tokens.inc(tokens)

    def _can_share(self, source: Lease, lease: Lease, tokens: int) -> bool:
        """Whether there are tokens to share, and their records can follow them."""
        can = False
        with self._faults.optional("records"):
            can = tokens > 0 and self._recorder.can_copy(source, lease, tokens)
        return can

    def release(self, lease: Lease) -> None:
        """Give its slot back."""
        for _ in range(2):  # where something raises, once more: else the slot would be lost
            try:
                self._release(lease)
                return
            except Exception as error:
                self._faults.count("release", error)

    def _release(self, lease: Lease) -> None:
        """Give the lease's slot back, with what is kept there for records and drafts. It may raise
        half-way, and is then called again."""
        with self._faults.optional("records"):
            self._recorder.forget(lease)
        with self._faults.optional("drafting"):
            self._drafting.close(lease)
        self.leases.pop(lease, None)
        if lease.slot is None:
            return
        # Before its pages are free: whoever counts both must not count them twice.
        lease.pages_held = 0
        self._cache.release(lease.slot)
        lease.slot = None

    def run_one_token(self) -> None:
        """Run a forward of one token, to see whether forwards succeed: in a slot of its own or,
        where none is free, behind the text of the shortest session, which keeps nothing of it."""
        own = self._cache.acquire() if self._cache.free else None
        slot = self._slot_of_shortest() if own is None else own
        try:
            # It is not committed, so the slot's text stays as it is.
            self._target.forward([Row.chain(slot, [0])]).wait()
        except FullError:
            pass  # sessions hold all pages: as healthy as when they got them
        finally:
            if own is not None:
                self._cache.release(own)

    def _slot_of_shortest(self) -> int:
        """The slot with the fewest tokens."""
        held = [lease.slot for lease in self.leases if lease.slot is not None]
        return min(held, key=self._cache.lengths.__getitem__)
