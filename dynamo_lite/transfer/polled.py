"""A mover with a thread that polls its transfers between the engine's steps.

UCX makes progress only inside calls of NIXL. A large write of VRAM needs many calls: the
send queue is limited, and later calls post the rest. Without this thread there are only a
few calls in each step of the engine.

NIXL's own progress thread knows no limit and never sleeps. This thread looks at the limit
(`PollLimit`) before each call, and sleeps while nothing is in flight.

All calls of the wrapped mover are made under one lock, by two threads: the owner's and this
one.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.runtime.clock import boottime
from dynamo_lite.runtime.process.stop import EXIT_OWNED_TASK_FAILED, end_process
from dynamo_lite.transfer.base import Mover, PollLimit, Transfer
from dynamo_lite.transfer.block_map import Descriptors

logger = logging.getLogger(__name__)

#: Pause between two rounds of polling while something is in flight.
INTERVAL_S = 150e-6
#: How long the thread reads notifications after the owner's last call of `notices`. The owner
#: calls it in each step while it expects any, so this covers steps of up to this length.
LISTEN_S = 1.0
#: Pause between two looks at a limit that has passed.
_PAUSED_S = 0.005
#: How long `close` waits for the thread.
CLOSE_S = 5.0


class PolledTransfer:
    """Implements Transfer. inner: the wrapped mover's transfer."""

    def __init__(self, owner: "PolledMover", inner: Transfer):
        self._owner, self._inner = owner, inner
        self._failure: TransferError | None = None
        self.over = False

    def done(self) -> bool:
        """Polls, unless the thread is polling at this moment."""
        if not self.over:
            self._owner.poll_once(self)
        # `over` is set after `_failure`, by either thread.
        if self.over and self._failure is not None:
            raise TransferError(self._failure.peer, self._failure.detail)
        return self.over

    def poll(self) -> None:
        """Call it with the owner's lock held. Raises only errors that a mover must not raise."""
        if self.over:
            return
        try:
            self.over = self._inner.done()
        except TransferError as exc:
            self._failure = exc
            self.over = True


class PolledMover:
    """Implements Mover. inner: must not be used elsewhere.

    limit: behind it the thread makes no call.
    listen_s: how long after a call of `notices` the thread reads notifications; 0: never.
    enter: called first in the thread, e.g. to choose a GPU. end_process: called in the thread if it
    fails.
    """

    def __init__(
        self,
        inner: Mover,
        *,
        limit: PollLimit | None = None,
        listen_s: float = LISTEN_S,
        enter: Callable[[], None] = lambda: None,
        end_process: Callable[[], None] = end_process,
    ):
        self._inner, self._limit, self._enter = inner, limit or PollLimit(), enter
        self._end_process = end_process
        self._listen_s, self._listen_until = listen_s, 0.0
        self._lock = threading.Lock()
        self._in_flight: set[PolledTransfer] = set()
        self._inbox: deque[bytes] = deque()
        self._wake = threading.Event()
        self._stopping = False
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
            lambda: self._inner.write(peer, local, remote, memory=memory, notice=notice)
        )

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, *, memory: tuple[str, str]
    ) -> PolledTransfer:
        return self._start(lambda: self._inner.read(peer, local, remote, memory=memory))

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

    def poll_once(self, transfer: PolledTransfer) -> None:
        """Polls the transfer from the owner's thread, unless the other thread is polling."""
        if not self._lock.acquire(blocking=False):
            # Releases the GIL, which the other thread may need to release the lock.
            time.sleep(0)
            if not self._lock.acquire(blocking=False):
                return
        try:
            self._poll(transfer)
        finally:
            self._lock.release()

    def stop(self) -> bool:
        """Stops the thread and leaves transfers in flight as they are. Returns whether it stopped
        within CLOSE_S. The owner's `done` and `notices` still work."""
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

    def _start(self, start: Callable[[], Transfer]) -> PolledTransfer:
        with self._lock:
            transfer = PolledTransfer(self, start())
            self._in_flight.add(transfer)
        self._wake.set()
        return transfer

    def _poll(self, transfer: PolledTransfer) -> None:
        transfer.poll()
        if transfer.over:
            self._in_flight.discard(transfer)

    def _run(self) -> None:
        try:
            self._enter()
            while not self._stopping:
                if not self._has_work():
                    self._await_work()
                elif self._round():
                    time.sleep(INTERVAL_S)
                else:
                    time.sleep(_PAUSED_S)
        except Exception:
            logger.critical(
                "the KV transfer thread has failed, and this process ends with exit code %d",
                EXIT_OWNED_TASK_FAILED,
                exc_info=True,
            )
            self._end_process()

    def _has_work(self) -> bool:
        return bool(self._in_flight) or time.monotonic() < self._listen_until

    def _await_work(self) -> None:
        self._wake.clear()
        # Work is added before the event is set: work from before `clear` is seen here.
        if not self._stopping and not self._has_work():
            self._wake.wait()

    def _round(self) -> bool:
        """Polls everything once. Returns False behind the limit."""
        with self._lock:
            transfers = tuple(self._in_flight)
        for transfer in transfers:
            # One at a time, so that the owner waits for one call at most.
            with self._lock:
                if boottime() >= self._limit.until:
                    return False
                self._poll(transfer)
        if time.monotonic() < self._listen_until:
            with self._lock:
                if boottime() >= self._limit.until:
                    return False
                self._inbox.extend(self._inner.notices())
        return True
