"""The requests of a run, from a file or made up."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dynamo_lite.capacity.request import TraceRequest, with_blocks
from dynamo_lite.capacity.trace_formats import Row, read_rows
from dynamo_lite.protocol.errors import ConfigError

#: Copies of a request have other blocks. This is the distance between their names (modulo 2^32).
_COPY = 0x9E3779B1
#: Copies arrive within this many seconds after the original.
_JITTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Which requests of a file, and when."""

    #: Part of the file, in seconds from its first request.
    from_s: float = 0.0
    to_s: float = math.inf
    #: 2: in half the time.
    speed: float = 1.0
    #: Number of copies of each request: 0.5 leaves out half of the requests.
    rate_scale: float = 1.0
    #: Arrivals per second, for files without times.
    rate: float | None = None
    #: Most requests that are read.
    limit: int | None = None
    block_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True)
class LoadTrace:
    """The requests, in order of arrival, and what was left out because it had no output."""

    name: str
    requests: list[TraceRequest]
    failed: int = 0


def tokens_of_text(text: str) -> int:
    """Estimates the tokens of a text: four characters per token."""
    return max(1, round(len(text) / 4))


def read_trace(
    path: Path, options: TraceOptions, count: Callable[[str], int] = tokens_of_text
) -> LoadTrace:
    """Raises ConfigError."""
    rng = random.Random(options.seed)
    requests: list[TraceRequest] = []
    failed = 0
    for at_s, row in _timed(path, options, rng, read_rows(path, count)):
        if not row.output_tokens or not row.prompt_tokens:
            failed += 1
            continue
        copies = int(options.rate_scale) + (rng.random() < options.rate_scale % 1)
        for copy in range(copies):
            later = rng.uniform(0, _JITTER_S) if copy else 0.0
            arrival_s = (at_s - options.from_s) / options.speed + later
            session = None if row.session is None else f"{row.session}.{copy}"
            requests.append(
                with_blocks(
                    arrival_s,
                    row.prompt_tokens,
                    row.output_tokens,
                    [block + copy * _COPY for block in row.blocks],
                    options.block_tokens,
                    session,
                )
            )
        if options.limit is not None and len(requests) >= options.limit:
            break
    if not requests:
        raise ConfigError([f"{path}: no request with a prompt and an output is in this window"])
    requests.sort(key=lambda request: request.arrival_s)
    return LoadTrace(path.name, requests[: options.limit], failed)


def _timed(
    path: Path, options: TraceOptions, rng: random.Random, rows: Iterator[Row]
) -> Iterator[tuple[float, Row]]:
    """The rows of the window, with seconds from the first one."""
    first, poisson_s = None, 0.0
    for row in rows:
        if row.at_s is None:
            if options.rate is None:
                raise ConfigError([f"{path} has no times: give --rate, arrivals per second"])
            poisson_s += rng.expovariate(options.rate)
            at_s = poisson_s
        else:
            first = row.at_s if first is None else first
            at_s = row.at_s - first
        if options.from_s <= at_s < options.to_s:
            yield at_s, row


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A made-up load: arrivals as in a Poisson process whose rate changes with time.

    Lengths are log-normal around their medians; sigma 0 makes them equal.
    """

    kind: str
    duration_s: float
    #: Requests per second: at the start, and at the highest.
    rate: float
    peak: float
    prompt_tokens: int = 2000
    output_tokens: int = 200
    sigma: float = 0.5
    #: Prompts that begin alike share this many tokens; 0: none do.
    shared_tokens: int = 0
    #: How many different beginnings there are.
    groups: int = 32

    def rate_at(self, at_s: float) -> float:
        part = at_s / self.duration_s
        low, high = self.rate, self.peak
        match self.kind:
            case "constant":
                return low
            case "step":
                return high if part >= 1 / 3 else low
            case "ramp":
                return low + (high - low) * part
            case "burst":
                return high if 0.4 <= part < 0.5 else low
            case "sine":
                return low + (high - low) * (1 - math.cos(4 * math.pi * part)) / 2
        raise ConfigError([f"load {self.kind!r} is unknown; accepted: {', '.join(SHAPES)}"])


SHAPES = ("constant", "step", "ramp", "burst", "sine")


def generate(shape: Shape, *, block_tokens: int, seed: int) -> LoadTrace:
    """Raises ConfigError when nothing arrives."""
    rng = random.Random(seed)
    highest = max(shape.rate, shape.peak)
    requests: list[TraceRequest] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(highest)) < shape.duration_s:
        if rng.random() * highest >= shape.rate_at(at_s):
            continue
        prompt = max(1, round(shape.prompt_tokens * rng.lognormvariate(0, shape.sigma)))
        output = max(1, round(shape.output_tokens * rng.lognormvariate(0, shape.sigma)))
        blocks: list[int] = []
        if shared := min(shape.shared_tokens, prompt) // block_tokens:
            group = rng.randrange(shape.groups)
            blocks = [group * 4096 + block for block in range(shared)]
            own = (1 << 24) + len(requests) * 4096
            blocks += [own + block for block in range(prompt // block_tokens - shared)]
        requests.append(with_blocks(at_s, prompt, output, blocks, block_tokens))
    if not requests:
        raise ConfigError(["no request arrives: make --duration or --rate larger"])
    return LoadTrace(shape.kind, requests)
