"""Plays ranges of seeds in processes of their own; what comes out does not depend on how many."""

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
from dynamo_lite.simulation import worker
from dynamo_lite.simulation.tally import Played

#: Seeds that a worker gets at a time.
_PORTION = 8
#: A seed takes a tenth of a second of real time; one that takes so long will not end.
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
    """left: the seeds that it has and has not played. since: when it began the first of them."""

    process: BaseProcess
    pipe: Connection
    left: deque[int] = field(default_factory=deque[int])
    since: float = 0.0
    greeted: bool = False

    @classmethod
    def start(cls, mutant: str | None) -> "_Worker":
        here, there = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=worker.work, args=(there, mutant), daemon=True)
        # A Ctrl-C while it starts is for us alone: it begins with that blocked.
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
        """What it says next; None for its greeting. Raises EOFError when it is dead."""
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
    seeds: range, *, jobs: int | None = None, mutant: str | None = None
) -> Generator[Played | Lost, None, None]:
    """The outcomes in the order of the seeds. Close it to stop before the end.

    jobs: processes; as many as there are cores if None. Raises StartupError.
    """
    crew = _Crew(seeds, min(jobs or os.cpu_count() or 1, len(seeds)), mutant)
    with closing(crew):
        for seed in seeds:
            while seed not in crew.ended:
                crew.go_on()
            yield crew.ended.pop(seed)


class _Crew:
    """The workers of one run. ended: outcomes that nobody has taken yet, by seed."""

    def __init__(self, seeds: range, jobs: int, mutant: str | None):
        self.ended: dict[int, Played | Lost] = {}
        self._mutant = mutant
        self._portions = deque(
            range(at, min(at + _PORTION, seeds.stop))
            for at in range(seeds.start, seeds.stop, _PORTION)
        )
        self._workers: list[_Worker] = []
        try:
            for _ in range(jobs):
                self._hire()
        except BaseException:
            self.close()
            raise

    def go_on(self) -> None:
        """Waits for something to happen."""
        ready = wait([w.pipe for w in self._workers], timeout=1.0)
        for each in list(self._workers):
            try:
                if each.pipe in ready:
                    self._hear(each)
                elif each.greeted and each.left and time.monotonic() - each.since > _SEED_S:
                    self._replace(each, f"no end after {_SEED_S:g} s, ended by", each.left[0])
            except (EOFError, BrokenPipeError):
                self._bury(each)

    def close(self) -> None:
        for each in self._workers:
            each.process.kill()
        for each in self._workers:
            each.end()
        self._workers.clear()

    def _hire(self) -> None:
        self._workers.append(_Worker.start(self._mutant))

    def _hear(self, each: _Worker) -> None:
        if (played := each.take()) is not None:
            self.ended[played.seed] = played
        if not each.left and self._portions:
            each.give(self._portions[0])
            self._portions.popleft()

    def _bury(self, each: _Worker) -> None:
        if not each.greeted:
            raise StartupError(f"a process that plays seeds did not start: {each.end()}")
        if each.left:
            self._replace(each, "the process that played it died:", each.left[0])
        else:
            self._replace(each, "", None)

    def _replace(self, each: _Worker, why: str, seed: int | None) -> None:
        """Another one goes on behind the seed that was too much for this one."""
        how = each.end()
        self._workers.remove(each)
        if seed is not None:
            self.ended[seed] = Lost(seed, f"{why} {how}")
            rest = range(seed + 1, each.left[-1] + 1)
            if rest:
                self._portions.appendleft(rest)
        self._hire()
