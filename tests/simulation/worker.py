"""A process that plays seeds for a runner: ranges come in, outcomes go out one by one."""

import signal
from multiprocessing.connection import Connection

import msgspec

from tests.simulation.loop.teardown import sweep
from tests.simulation.mutants import MUTANTS
from tests.simulation.play import play
from tests.simulation.tally import Played

#: A worker's first message.
HELLO = b"ready"

#: A sweep looks at all modules' objects, and takes a third of the time of a seed.
_SWEEP_EVERY = 64

encode = msgspec.msgpack.encode
decode_played = msgspec.msgpack.Decoder(Played).decode
decode_range = msgspec.msgpack.Decoder(tuple[int, int]).decode


def work(pipe: Connection, mutant: str | None) -> None:
    """Plays (first, end) after (first, end) until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    shipped = MUTANTS[mutant].parts() if mutant else None
    played = 0
    try:
        pipe.send_bytes(HELLO)
        while True:
            first, end = decode_range(pipe.recv_bytes())
            for seed in range(first, end):
                pipe.send_bytes(encode(play(seed, shipped=shipped)))
                played += 1
                if played % _SWEEP_EVERY == 0:
                    sweep()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
