"""Records that are sealed with the graph's secret, and when a command may write without it."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.cli.listing import Place, check_may_write, find_seals, unchecked
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import ProtocolError, StartupError
from dynamo_lite.protocol.records import StockEngine
from dynamo_lite.runtime.sealed_records import UNSEALED, RecordSeals, is_sealed
from dynamo_lite.serve.run_state import RunFile, RunState
from tests.builders import endpoint_record, graph_secret
from tests.twins.servers import MemoryStore

KEY, OTHER = "ns/config/VllmWorker", "ns/config/Frontend"
RECORD = b'{"values":{"a":1},"version":3}'
OLD, NEW = b"o" * 32, b"n" * 32


@pytest.fixture
def seals(tmp_path: Path) -> RecordSeals:
    return RecordSeals(graph_secret(tmp_path / "secret", OLD))


def test_a_sealed_record_is_this_json_and_comes_back(seals: RecordSeals):
    data = seals.sealed(KEY, RECORD)
    found = json.loads(data)
    assert found["record"] == json.loads(RECORD) and len(found["seal"]) == 32
    assert list(found) == ["seal", "record"]
    assert seals.opened(KEY, data) == RECORD
    assert is_sealed(data) and not is_sealed(RECORD)


def test_every_change_of_a_sealed_record_breaks_its_seal(seals: RecordSeals):
    data = seals.sealed(KEY, RECORD)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(ProtocolError, match="not authentic"):
            seals.opened(KEY, changed)


def test_a_record_of_another_key_or_secret_is_not_authentic(seals: RecordSeals, tmp_path: Path):
    with pytest.raises(ProtocolError, match="not authentic"):
        seals.opened(OTHER, seals.sealed(KEY, RECORD))
    stranger = RecordSeals(graph_secret(tmp_path / "another"))
    with pytest.raises(ProtocolError, match="not authentic") as caught:
        seals.opened(KEY, stranger.sealed(KEY, RECORD))
    assert OLD.hex() not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [RECORD, b"", b"{}", b"\xff", b"[" * 10_000, b'{"seal":"zz","record":{}}', b'{"seal":1}'],
)
def test_what_has_no_seal_is_not_authentic(tmp_path: Path, data: bytes):
    """Nor is the tag of a message of the same bytes, under the same secret, a seal."""
    secret = graph_secret(tmp_path / "secret")
    tag = secret.tag(b"message " + KEY.encode(), RECORD).hex()
    for unsealed in (data, b'{"seal":"%s","record":%s}' % (tag.encode(), RECORD)):
        with pytest.raises(ProtocolError, match="not authentic"):
            RecordSeals(secret).opened(KEY, unsealed)


def test_without_a_secret_nothing_is_sealed_and_nothing_checked(seals: RecordSeals):
    assert UNSEALED.sealed(KEY, RECORD) == RECORD == UNSEALED.opened(KEY, RECORD)
    assert UNSEALED.opened(OTHER, seals.sealed(KEY, RECORD)) == RECORD
    assert UNSEALED.opened(KEY, b"\xff") == b"\xff"


def test_both_keys_hold_while_a_secret_is_replaced(tmp_path: Path):
    path = tmp_path / "secret"

    def rewrite(*keys: bytes) -> RecordSeals:
        return RecordSeals(graph_secret(path, *keys))

    old = rewrite(OLD).sealed(KEY, RECORD)
    assert rewrite(OLD, NEW).sealed(KEY, RECORD) == old
    both = rewrite(NEW, OLD)
    assert both.opened(KEY, old) == RECORD
    new = both.sealed(KEY, RECORD)
    last = rewrite(NEW)
    assert new != old and last.opened(KEY, new) == RECORD
    with pytest.raises(ProtocolError):
        last.opened(KEY, old)


async def test_who_has_no_secret_may_write_only_where_none_is_used(seals: RecordSeals):
    store, key = MemoryStore(), names.live_options_key("n", "VllmWorker")
    engine = StockEngine(url="http://127.0.0.1:1", role="decode", protocol="vllm")

    async def check(*members: Any, by: RecordSeals = UNSEALED) -> None:
        await check_may_write(store, [key], members, by)

    ours, open_one = endpoint_record(authenticated=True), endpoint_record()
    await check()
    await check(open_one)
    await check(endpoint_record(authenticated=True, engine=engine))
    with pytest.raises(StartupError, match="has a secret; name it with --secret-file"):
        await check(open_one, ours)
    await check(ours, by=seals)
    await store.put(key, seals.sealed(key, RECORD))
    with pytest.raises(StartupError, match="n/config/VllmWorker is sealed"):
        await check()
    await check(open_one)
    assert "--secret-file" in unchecked([ours], UNSEALED)
    assert not unchecked([ours], seals) and not unchecked([open_one], UNSEALED)


def test_a_command_takes_the_secret_of_the_graph_that_runs_here(tmp_path: Path):
    path = tmp_path / "secret"
    graph_secret(path)
    state = RunState(
        pid=1, started_at=0, graph="g", namespace="n", etcd="http://a", secret=str(path)
    )
    place = Place(etcd_url="http://a", namespace="n")
    assert not find_seals(tmp_path, place, None).checked
    RunFile(tmp_path / "run.json", state).write()
    assert find_seals(tmp_path, place, None).checked
    assert not find_seals(tmp_path, Place(etcd_url="http://b", namespace="n"), None).checked
    assert not find_seals(tmp_path, Place(etcd_url="http://a", namespace="m"), None).checked
    assert find_seals(tmp_path, Place(etcd_url="http://b", namespace="m"), path).checked
    with pytest.raises(StartupError, match="cannot read"):
        find_seals(tmp_path, place, tmp_path / "none")
