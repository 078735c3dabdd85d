"""The calibration of the capacity simulation: known constants are found again."""

import random
from pathlib import Path

import pytest

from benchmarks.fit import StepRecord, fit, read_records, write_records
from dynamo_lite.capacity.timing import StepTiming

KNOWN = StepTiming(step_s=0.004, token_s=2e-5, attention_s=5e-8, stream_s=3e-5, kv_token_s=4e-7)


def records(noise: float, known: StepTiming = KNOWN, seed: int = 0) -> list[StepRecord]:
    rng = random.Random(seed)
    made: list[StepRecord] = []
    for _ in range(400):
        tokens, streams = rng.choice([0, 16, 256, 2048]), rng.choice([0, 1, 4, 16])
        attention, kv = tokens * rng.randrange(3000), streams * rng.randrange(4000)
        seconds = known.one(tokens=tokens, attention=attention, streams=streams, kv=kv)
        seconds *= rng.uniform(1 - noise, 1 + noise)
        made.append(StepRecord(tokens, attention, streams, kv, seconds))
    return made


def test_constants_are_found_again():
    timing, errors = fit(records(0.0))
    for name in KNOWN.__struct_fields__:
        assert getattr(timing, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3)
    assert errors.records == 120 and errors.p95 < 1e-3


def test_noise_is_the_held_out_error():
    timing, errors = fit(records(0.2))
    assert timing.token_s == pytest.approx(KNOWN.token_s, rel=0.15)
    assert 0.05 < errors.median < 0.15


def test_no_constant_is_negative():
    """A cost that falls with the batch cannot be said: its constant is 0."""
    falling = [
        StepRecord(
            one.tokens, one.attention, one.streams, one.kv_tokens, one.seconds - 2e-4 * one.streams
        )
        for one in records(0.05)
    ]
    timing, _ = fit(falling)
    assert timing.stream_s == 0
    assert all(getattr(timing, name) >= 0 for name in timing.__struct_fields__)


def test_records_as_a_file(tmp_path: Path):
    file = tmp_path / "records.jsonl"
    made = records(0.1)
    write_records(file, made)
    assert read_records(file) == made
    file.write_text(file.read_text() + '{"tokens": 1}\n')
    with pytest.raises(ValueError, match=f"{file}:401: "):
        read_records(file)
