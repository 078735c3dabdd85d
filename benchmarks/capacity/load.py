"""The requests of a run: a made-up load whose rate changes with time."""

import math
import random
from dataclasses import dataclass

SHAPES = ("constant", "step", "ramp", "burst", "sine")


@dataclass(frozen=True, slots=True)
class Request:
    """No two requests share a prefix."""

    #: Seconds from the start of the run.
    arrival_s: float
    prompt_tokens: int
    #: At least 1.
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Arrivals as in a Poisson process whose rate changes with time.

    Lengths are log-normal around their medians; sigma 0 makes them equal.
    """

    #: One of `SHAPES`.
    kind: str
    duration_s: float
    #: Requests per second: at the start, and at the highest.
    rate: float
    peak: float
    prompt_tokens: int = 2000
    output_tokens: int = 200
    sigma: float = 0.5

    def rate_at(self, at_s: float) -> float:
        part = at_s / self.duration_s
        low, high = self.rate, self.peak
        match self.kind:
            case "step":
                return high if part >= 1 / 3 else low
            case "ramp":
                return low + (high - low) * part
            case "burst":
                return high if 0.4 <= part < 0.5 else low
            case "sine":
                return low + (high - low) * (1 - math.cos(4 * math.pi * part)) / 2
            case _:
                return low

    def requests(self, seed: int) -> list[Request]:
        """In order of arrival."""
        rng = random.Random(seed)
        highest = max(self.rate, self.peak)
        made: list[Request] = []
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(highest)) < self.duration_s:
            if rng.random() * highest >= self.rate_at(at_s):
                continue
            prompt = max(1, round(self.prompt_tokens * rng.lognormvariate(0, self.sigma)))
            output = max(1, round(self.output_tokens * rng.lognormvariate(0, self.sigma)))
            made.append(Request(at_s, prompt, output))
        return made
