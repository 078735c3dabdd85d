"""Traces of the capacity simulation: formats that users have, broken lines, made-up loads."""

import json
import statistics
from pathlib import Path

import pytest

from dynamo_lite.capacity.traces import (
    SHAPES,
    Shape,
    TraceOptions,
    generate,
    read_trace,
)
from dynamo_lite.protocol.errors import ConfigError

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 3000, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 2361]},
    {"timestamp": 9000, "input_length": 600, "output_length": 9, "hash_ids": [7, 8]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.0319600,3180,8
2023-11-16 18:18:04.0319600,110,27
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
"""
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "x" * 400},
            {"from": "gpt", "value": "y" * 80},
            {"from": "human", "value": "z" * 40},
            {"from": "gpt", "value": "w" * 20},
        ],
    },
    {"id": "b", "conversations": [{"from": "human", "value": "only a question"}]},
]


def written(folder: Path, text: str) -> Path:
    file = folder / "trace"
    file.write_text(text)
    return file


def mooncake(folder: Path, rows: list[dict[str, object]] | None = None) -> Path:
    return written(folder, "".join(json.dumps(row) + "\n" for row in rows or MOONCAKE))


def test_mooncake(tmp_path: Path):
    made = read_trace(mooncake(tmp_path), TraceOptions()).requests
    assert [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in made] == [
        (0.0, 1100, 52),
        (3.0, 1030, 26),
        (9.0, 600, 9),
    ]
    assert [len(one.hashes) for one in made] == [2, 2, 1]
    assert made[0].hashes == made[1].hashes
    assert made[2].hashes[0] not in made[0].hashes


def test_mooncake_with_the_names_of_dynamos_generator(tmp_path: Path):
    rows = [
        {"created_time": 1000, "input_tokens": 10, "output_tokens": 5, "session_id": "s"},
        {"delay_ms": 500, "input_tokens": 20, "output_tokens": 5, "session_id": "s"},
    ]
    made = read_trace(mooncake(tmp_path, rows), TraceOptions()).requests
    assert [(one.arrival_s, one.session) for one in made] == [(0.0, "s.0"), (0.5, "s.0")]


def test_azure(tmp_path: Path):
    made = read_trace(written(tmp_path, AZURE), TraceOptions()).requests
    assert [one.arrival_s for one in made] == pytest.approx([0.0, 1.052, 60.052])
    assert [(one.prompt_tokens, one.output_tokens) for one in made] == [
        (4808, 10),
        (3180, 8),
        (110, 27),
    ]
    zoned = AZURE.replace("9799600,4808", "979960+00:00,4808")
    assert read_trace(written(tmp_path, zoned), TraceOptions()).requests == made


def test_burstgpt_without_the_failed_ones(tmp_path: Path):
    made = read_trace(written(tmp_path, BURSTGPT), TraceOptions())
    assert [(one.arrival_s, one.prompt_tokens) for one in made.requests] == [(0, 472), (40, 1087)]
    assert made.failed == 1
    head, *lines = BURSTGPT.splitlines()
    longer = [head.replace("Timestamp,", "Timestamp,Session ID,Elapsed time,")]
    longer += [line.replace(",", ",7,0.5,", 1) for line in lines]
    again = read_trace(written(tmp_path, "\n".join(longer)), TraceOptions())
    assert [one.session for one in again.requests] == ["7.0", "7.0"]


def test_sharegpt(tmp_path: Path):
    file = written(tmp_path, json.dumps(SHAREGPT, indent=1))
    made = read_trace(file, TraceOptions(rate=2.0, block_tokens=16)).requests
    assert [(one.prompt_tokens, one.output_tokens) for one in made] == [(100, 20), (130, 5)]
    assert made[1].hashes[:6] == made[0].hashes
    assert made[0].arrival_s < made[1].arrival_s
    words = read_trace(file, TraceOptions(rate=2.0), lambda text: len(text)).requests
    assert [one.prompt_tokens for one in words] == [400, 520]
    with pytest.raises(ConfigError, match="give --rate"):
        read_trace(file, TraceOptions())


def test_a_large_sharegpt_file_is_read_in_parts(tmp_path: Path):
    many = [{**SHAREGPT[0], "id": str(number)} for number in range(3000)]
    file = written(tmp_path, json.dumps(many))
    assert file.stat().st_size > 3 << 19
    assert len(read_trace(file, TraceOptions(rate=10.0)).requests) == 6000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}\n{oops', ":2: not JSON"),
        ('{"timestamp": 0, "output_length": 1}', ":1: input_length is missing"),
        (
            '{"timestamp": 0, "input_length": -3, "output_length": 1}',
            ":1: input_length is -3; accepted: a whole number from 0 to 1e\\+07",
        ),
        (
            '{"timestamp": "soon", "input_length": 3, "output_length": 1}',
            ":1: timestamp is 'soon'; accepted: a number from 0",
        ),
        (
            '{"timestamp": NaN, "input_length": 3, "output_length": 1}',
            ":1: timestamp is nan; accepted",
        ),
        (
            '{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": 4}',
            ":1: hash_ids is 4; accepted: a list",
        ),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}\n[1]', ":2: not a JSON object"),
        (AZURE.replace("3180", "3180.5"), ":3: ContextTokens is 3180.5; accepted: a whole"),
        (AZURE.replace("2023-11-16 18:17:05", "yesterday"), ":3: TIMESTAMP is 'yesterday"),
        (AZURE.replace(",3180,8", ",3180"), ":3: 2 columns; accepted: 3"),
        (BURSTGPT.replace("1087", "many"), ":3: Request tokens is 'many'; accepted"),
        ('[{"id": 1}]', ":1: a conversation without"),
        ('[{"conversations": [{"from": "human"}]}]', ":1: a turn without a text"),
        ('[{"conversations": []},\n {"conver', ":2: not JSON"),
        ("a,b,c\n1,2,3\n", ":1: unknown format; accepted: JSON lines with timestamp"),
        ("", "is empty"),
        (BURSTGPT.splitlines()[0] + "\n", "no request"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path, text), TraceOptions(rate=1.0))


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none", TraceOptions())


def test_window_speed_and_rate(tmp_path: Path):
    file = mooncake(tmp_path)
    part = read_trace(file, TraceOptions(from_s=1.0, to_s=9.0)).requests
    assert [one.arrival_s for one in part] == [2.0]
    faster = read_trace(file, TraceOptions(speed=2.0)).requests
    assert [one.arrival_s for one in faster] == [0.0, 1.5, 4.5]
    tripled = read_trace(file, TraceOptions(rate_scale=3.0)).requests
    assert len(tripled) == 9
    assert len({one.hashes for one in tripled}) == 6
    assert len(read_trace(file, TraceOptions(limit=2)).requests) == 2
    rows = [{**MOONCAKE[0], "timestamp": at} for at in range(0, 1_000_000, 1000)]
    assert (
        420 < len(read_trace(mooncake(tmp_path, rows), TraceOptions(rate_scale=0.5)).requests) < 580
    )


@pytest.mark.parametrize("kind", SHAPES)
def test_made_up_loads_have_their_rates(kind: str):
    shape = Shape(kind=kind, duration_s=2000, rate=2.0, peak=8.0, sigma=0.0)
    made = generate(shape, block_tokens=512, seed=3).requests
    assert made == generate(shape, block_tokens=512, seed=3).requests
    assert made != generate(shape, block_tokens=512, seed=4).requests
    for start in range(0, 2000, 250):
        expected = statistics.fmean(shape.rate_at(start + 2.5 * i) for i in range(100)) * 250
        found = sum(start <= one.arrival_s < start + 250 for one in made)
        assert abs(found - expected) < 6 * expected**0.5
    assert {(one.prompt_tokens, one.output_tokens) for one in made} == {(2000, 200)}


def test_made_up_prompts_of_a_group_begin_alike():
    shape = Shape(kind="constant", duration_s=50, rate=2.0, peak=2.0, shared_tokens=1100, groups=1)
    made = [
        one for one in generate(shape, block_tokens=512, seed=0).requests if len(one.hashes) > 2
    ]
    assert len({one.hashes[:2] for one in made}) == 1
    assert len({one.hashes[2] for one in made}) == len(made)


def test_an_unknown_load():
    with pytest.raises(ConfigError, match="accepted: constant, step, ramp, burst, sine"):
        generate(Shape(kind="flood", duration_s=10, rate=2.0, peak=2.0), block_tokens=16, seed=0)
