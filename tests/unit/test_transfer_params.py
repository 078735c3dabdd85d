"""The parameters that a component hands to its engine's scheduler half."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_lite.disagg.transfer_params import (
    DecodeRequestParams,
    PrefillJobParams,
    pack,
    unpack,
)
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.claim_cells import Cell
from tests.builders import engine_metadata, prefill_job

TARGET = engine_metadata(num_blocks=9)
JOB = prefill_job(
    request_id="r1",
    prompt_token_ids=list(range(20)),
    num_computed_tokens=8,
    block_ids=[4, 5, 6],
    prefix_block_ids=[2, 3],
)
PARAMS = PrefillJobParams.of(JOB, TARGET, Cell(2, 9))


def carrier(params: Any) -> Any:
    return SimpleNamespace(request_id="r1", kv_transfer_params=params)


def carried(params: Any) -> Any:
    """As the other process gets them: vLLM sends `extra_args` as untyped msgpack."""
    return carrier(msgspec.msgpack.decode(msgspec.msgpack.encode(pack(params))))


def test_a_job_is_unpacked_as_it_was_packed():
    assert unpack(carried(PARAMS), PrefillJobParams) == PARAMS
    assert PARAMS == PrefillJobParams(
        engine_id="e1",
        num_computed_tokens=8,
        num_tokens=20,
        block_size=4,
        block_ids=[4, 5, 6],
        prefix_block_ids=[2, 3],
        target=encode(TARGET),
        cell=Cell(2, 9),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine_id", "e1/../e2"),
        ("num_computed_tokens", -1),
        ("num_computed_tokens", "8"),
        ("num_tokens", 0),
        ("block_size", 0),
        ("block_ids", [1, -1]),
        ("block_ids", None),
        ("prefix_block_ids", [0.5]),
        ("target", 3),
    ],
)
def test_a_bad_value_is_refused_by_its_name(field: str, value: Any):
    bad = carrier(pack(PARAMS) | {field: value})
    with pytest.raises(ProtocolError, match=rf"^request r1: kv_transfer_params: .*\$\.{field}"):
        unpack(bad, PrefillJobParams)


def test_a_bad_deadline_is_refused():
    with pytest.raises(ProtocolError, match=r"\$\.deadline"):
        unpack(carrier({"deadline": "soon"}), DecodeRequestParams)
