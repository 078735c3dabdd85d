"""Plays ranges of seeds in several processes; the outcomes do not depend on their number."""

import os
import signal
import time
from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from dynamo_lite.protocol.errors import StartupError
from tests.simulation import worker
from tests.simulation.tally import Played

#: Seeds that a worker gets at a time. Few: at the end all workers have something to do for as long
#: as possible.
_PORTION = 2
#: A seed takes some tenths of a second of real time. After this long it counts as endless.
_SEED_S = 120.0
_JOIN_S = 5.0

_CONTEXT = get_context("spawn")


@dataclass(frozen=True)
class Lost:
    """A seed without an outcome: the process that played it died, or did not end."""

    seed: int
    why: str


@dataclass(eq=False)
class _Worker:
    """A process that plays seeds."""

    process: BaseProcess
    pipe: Connection
    #: Assigned seeds that it has not played yet.
    left: deque[int] = field(default_factory=deque[int])
    #: Monotonic time at which it began the first of them.
    since: float = 0.0
    #: Whether it has started: its first message has arrived.
    greeted: bool = False

    @classmethod
    def start(cls, mutant: str | None) -> "_Worker":
        here, there = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=worker.work, args=(there, mutant), daemon=True)
        # A Ctrl-C while it starts must interrupt this process only: it starts with it blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            there.close()
        return cls(process, here)

    def give(self, seeds: range) -> None:
        self.pipe.send_bytes(worker.encode((seeds.start, seeds.stop)))
        self.left, self.since = deque(seeds), time.monotonic()

    def take(self) -> Played | None:
        """Its next outcome; None for its first message. Raises EOFError when it is dead."""
        try:
            raw = self.pipe.recv_bytes()
        except OSError as exc:
            raise EOFError from exc
        self.since = time.monotonic()
        if not self.greeted:
            self.greeted = True
            return None
        self.left.popleft()
        return worker.decode_played(raw)

    def end(self) -> str:
        """Kills it, unless it is dead. Returns how it ended."""
        self.process.join(0 if self.process.is_alive() else _JOIN_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(_JOIN_S)
        self.pipe.close()
        code = self.process.exitcode
        return f"exit {code}" if code is None or code >= 0 else f"signal {-code}"


def play_many(
    seeds: range, *, jobs: int | None = None, mutant: str | None = None, portion: int = _PORTION
) -> Generator[Played | Lost, None, None]:
    """The outcomes in the order of the seeds. Close it to stop before the end.

    jobs: processes; as many as there are cores if None. portion: seeds that one of them gets at a
    time. Raises StartupError.
    """
    crew = _Crew(seeds, min(jobs or os.cpu_count() or 1, len(seeds)), mutant, portion)
    with closing(crew):
        for seed in seeds:
            while seed not in crew.ended:
                crew.go_on()
            yield crew.ended.pop(seed)


class _Crew:
    """The workers of one run."""

    def __init__(self, seeds: range, jobs: int, mutant: str | None, portion: int):
        #: Outcomes that `play_many` has not given yet, by seed.
        self.ended: dict[int, Played | Lost] = {}
        self._mutant = mutant
        self._portions = deque(
            range(at, min(at + portion, seeds.stop))
            for at in range(seeds.start, seeds.stop, portion)
        )
        self._workers: list[_Worker] = []
        try:
            for _ in range(jobs):
                self._start_worker()
        except BaseException:
            self.close()
            raise

    def go_on(self) -> None:
        """Waits for something to happen."""
        ready = wait([w.pipe for w in self._workers], timeout=1.0)
        for each in list(self._workers):
            try:
                if each.pipe in ready:
                    self._receive(each)
                elif each.greeted and each.left and time.monotonic() - each.since > _SEED_S:
                    self._replace(each, f"no end after {_SEED_S:g} s, ended by", each.left[0])
            except (EOFError, BrokenPipeError):
                self._replace_dead(each)

    def close(self) -> None:
        for each in self._workers:
            each.process.kill()
        for each in self._workers:
            each.end()
        self._workers.clear()

    def _start_worker(self) -> None:
        self._workers.append(_Worker.start(self._mutant))

    def _receive(self, each: _Worker) -> None:
        if (played := each.take()) is not None:
            self.ended[played.seed] = played
        if not each.left and self._portions:
            each.give(self._portions[0])
            self._portions.popleft()

    def _replace_dead(self, each: _Worker) -> None:
        if not each.greeted:
            raise StartupError(f"a process that plays seeds did not start: {each.end()}")
        if each.left:
            self._replace(each, "the process that played it died:", each.left[0])
        else:
            self._replace(each, "", None)

    def _replace(self, each: _Worker, why: str, seed: int | None) -> None:
        """A new worker continues after the seed that ended or blocked this one."""
        how = each.end()
        self._workers.remove(each)
        if seed is not None:
            self.ended[seed] = Lost(seed, f"{why} {how}")
            rest = range(seed + 1, each.left[-1] + 1)
            if rest:
                self._portions.appendleft(rest)
        self._start_worker()
