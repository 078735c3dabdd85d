"""A mover with a thread that moves its transfers on between the engine's steps.

UCX makes progress only inside calls of NIXL. For VRAM a large write needs many of
them: a send queue holds so many posted writes, and what is behind them is posted by
later calls. Without this thread these calls come with the engine's steps, a few per
step.

NIXL's own progress thread would also move writes on behind a closed fence, and it
never sleeps. This one looks at the fence before each call, and waits without a wake-up
while nothing is in flight.

All calls of the wrapped mover are made under one lock, from two threads: the owner's and
this one.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.transfer.base import Mover, Transfer
from dynamo_lite.transfer.block_map import Descriptors

logger = logging.getLogger(__name__)

#: Pause between two rounds of polling while something is in flight.
INTERVAL_S = 150e-6
#: A reader of notices polls for so long after its owner has last asked for them. The owner
#: asks in each step while it waits for any, so this is the longest step that is covered.
LISTEN_S = 1.0
#: Pause between two looks at a closed fence.
_FENCED_S = 0.005
#: How long `close` waits for the thread.
CLOSE_S = 5.0


def _always() -> bool:
    return True


def _nothing() -> None:
    return None


class PolledTransfer:
    """Implements Transfer. peer: of the transfer; inner: the wrapped mover's."""

    def __init__(self, owner: "PolledMover", peer: str, inner: Transfer):
        self._owner, self._inner = owner, inner
        self._failure: tuple[str, str] | None = None
        self._peer = peer
        self.over = False

    def done(self) -> bool:
        """Polls, unless the thread is polling at this moment."""
        if not self.over:
            self._owner.look_at(self)
        # `over` is set after `_failure`, by either thread.
        if self.over and self._failure is not None:
            raise TransferError(*self._failure)
        return self.over

    def poll(self) -> None:
        """Under the owner's lock. Raises only what a mover must not raise."""
        if self.over:
            return
        try:
            ended = self._inner.done()
        except TransferError as exc:
            self._failure = exc.peer, exc.detail
            ended = True
        if ended and self._failure is None and self._owner.broken is not None:
            self._failure = self._peer, self._owner.broken
        self.over = ended

    def fail(self, why: str) -> None:
        self._failure = self._peer, why
        self.over = True


class PolledMover:
    """Implements Mover. inner: must be used by nobody else.

    alive: the fence; behind a closed one the thread makes no call. listen_s: for how long
    after a call of `notices` the thread reads them; 0 if it never does. enter: called
    first in the thread, e.g. to choose a GPU.

    If the thread dies, new transfers are refused, and those in flight fail once they have
    ended; the owner's own calls move them on. Notices are read by the owner's calls.
    """

    def __init__(
        self,
        inner: Mover,
        *,
        alive: Callable[[], bool] = _always,
        listen_s: float = LISTEN_S,
        enter: Callable[[], None] = _nothing,
    ):
        self._inner, self._alive, self._enter = inner, alive, enter
        self._listen_s, self._listen_until = listen_s, 0.0
        self._lock = threading.Lock()
        self._flying: set[PolledTransfer] = set()
        self._inbox: deque[bytes] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self.broken: str | None = None
        self.thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self.thread.start()
        # NIXL must not be taken down while the thread is inside one of its calls.
        atexit.register(self.stop)

    def register(self, spans: Sequence[tuple[int, int]], memory: str, device: int) -> None:
        with self._lock:
            self._inner.register(spans, memory, device)

    def metadata(self) -> bytes:
        with self._lock:
            return self._inner.metadata()

    def add_peer(self, peer: str, metadata: bytes) -> None:
        with self._lock:
            self._inner.add_peer(peer, metadata)

    def remove_peer(self, peer: str) -> None:
        with self._lock:
            self._inner.remove_peer(peer)

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        *,
        memory: tuple[str, str],
        notice: bytes = b"",
    ) -> PolledTransfer:
        return self._start(
            peer, lambda: self._inner.write(peer, local, remote, memory=memory, notice=notice)
        )

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, *, memory: tuple[str, str]
    ) -> PolledTransfer:
        return self._start(peer, lambda: self._inner.read(peer, local, remote, memory=memory))

    def notices(self) -> list[bytes]:
        if self._listen_s:
            self._listen_until = time.monotonic() + self._listen_s
            self._wake.set()
        if self._lock.acquire(blocking=False):
            try:
                self._inbox.extend(self._inner.notices())
            finally:
                self._lock.release()
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def look_at(self, transfer: PolledTransfer) -> None:
        """Polls it from the owner's thread, unless the other one polls."""
        if not self._lock.acquire(blocking=False):
            # Gives the interpreter to the other thread, which may need it to release the lock.
            time.sleep(0)
            if not self._lock.acquire(blocking=False):
                return
        try:
            self._poll(transfer)
        except Exception as exc:
            logger.exception("polling a KV transfer")
            transfer.fail(f"polling it failed: {exc!r}")
            self._flying.discard(transfer)
        finally:
            self._lock.release()

    def stop(self) -> bool:
        """Ends the thread, and leaves what is in flight as it is. Returns whether it ended
        within CLOSE_S; `done` and `notices` of the owner go on to work."""
        self._stopping = True
        self._wake.set()
        atexit.unregister(self.stop)
        self.thread.join(CLOSE_S)
        return not self.thread.is_alive()

    def close(self) -> None:
        if not self.stop():
            logger.error(
                "the KV transfer thread has not ended within %g s: its NIXL agent stays open"
                " until this process ends",
                CLOSE_S,
            )
            return
        with self._lock:
            self._inner.close()

    def _start(self, peer: str, start: Callable[[], Transfer]) -> PolledTransfer:
        if self.broken is not None:
            raise TransferError(peer, self.broken)
        with self._lock:
            transfer = PolledTransfer(self, peer, start())
            self._flying.add(transfer)
        self._wake.set()
        return transfer

    def _poll(self, transfer: PolledTransfer) -> None:
        transfer.poll()
        if transfer.over:
            self._flying.discard(transfer)

    def _run(self) -> None:
        try:
            self._enter()
            while not self._stopping:
                if not self._has_work():
                    self._await_work()
                elif self._round():
                    time.sleep(INTERVAL_S)
                else:
                    time.sleep(_FENCED_S)
        except Exception as exc:
            self.broken = f"the KV transfer thread of this rank has died: {exc!r}"
            logger.exception("the KV transfer thread has died: new transfers are refused")

    def _has_work(self) -> bool:
        return bool(self._flying) or time.monotonic() < self._listen_until

    def _await_work(self) -> None:
        self._wake.clear()
        # Whoever brings work sets the event after it: work from before this is seen here.
        if not self._stopping and not self._has_work():
            self._wake.wait()

    def _round(self) -> bool:
        """Polls everything once. Returns False if the fence is closed."""
        with self._lock:
            flying = tuple(self._flying)
        for transfer in flying:
            # One at a time, so that the owner waits for one call at most.
            with self._lock:
                if not self._alive():
                    return False
                self._poll(transfer)
        if time.monotonic() < self._listen_until:
            with self._lock:
                if not self._alive():
                    return False
                self._inbox.extend(self._inner.notices())
        return True
