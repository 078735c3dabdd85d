"""Step records of an engine, and the timing that fits them."""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dynamo_lite.capacity.timing import FitErrors, StepTiming

#: Share of the records that are not fitted.
HELD_OUT = 0.3


@dataclass(frozen=True)
class StepRecord:
    """One step: prefill tokens, their attention work, decoding sequences, their KV tokens, and
    seconds; see `StepTiming`."""

    tokens: int
    attention: float
    streams: int
    kv_tokens: int
    seconds: float

    @property
    def row(self) -> tuple[float, ...]:
        return (1.0, self.tokens, self.attention, self.streams, self.kv_tokens)


def write_records(file: Path, records: Sequence[StepRecord]) -> None:
    file.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))


def read_records(file: Path) -> list[StepRecord]:
    """Raises ValueError with the line."""
    records: list[StepRecord] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            record = StepRecord(**json.loads(line))
            if not record.seconds > 0 or min(record.row) < 0:
                raise ValueError("seconds must be above 0 and amounts at least 0")
        except (TypeError, ValueError) as exc:
            raise ValueError(f"{file}:{number}: {exc}") from exc
        records.append(record)
    return records


def fit(records: Sequence[StepRecord], seed: int = 0) -> tuple[StepTiming, FitErrors]:
    """Non-negative least squares of the relative errors, and the errors on the held-out part.

    With five unknowns the best non-negative solution is found by solving for every subset of them:
    the unconstrained optimum of the subset that the best solution uses.
    """
    shuffled = list(records)
    random.Random(seed).shuffle(shuffled)
    cut = max(1, round(len(shuffled) * HELD_OUT))
    held, used = shuffled[:cut], shuffled[cut:]
    seconds = np.array([record.seconds for record in used])
    matrix = np.array([record.row for record in used]) / seconds[:, None]
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = None, np.inf
    for size in range(1, matrix.shape[1] + 1):
        for columns in itertools.combinations(range(matrix.shape[1]), size):
            chosen = list(columns)
            part = matrix[:, chosen] / scale[chosen]
            found, *_ = np.linalg.lstsq(part, np.ones(len(used)), rcond=None)
            residual = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and residual < least * (1 - 1e-9) and 0 in chosen:
                values = np.zeros(matrix.shape[1])
                values[chosen] = found / scale[chosen]
                best, least = values, residual
    if best is None or best[0] <= 0:
        raise ValueError("no timing fits: all steps need some time, and more records")
    timing = StepTiming(
        **{
            name: float(f"{value:.6g}")
            for name, value in zip(StepTiming.__struct_fields__, best, strict=True)
        }
    )
    errors = sorted(abs(float(np.dot(best, record.row)) / record.seconds - 1) for record in held)
    return timing, FitErrors(
        records=len(held),
        median=round(errors[len(errors) // 2], 4),
        p95=round(errors[min(len(errors) - 1, int(0.95 * len(errors)))], 4),
    )
