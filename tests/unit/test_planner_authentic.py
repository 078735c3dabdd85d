"""Which records of the planner are believed: what a forged, a copied and an old one does."""

import logging
from collections import Counter
from pathlib import Path

import pytest

from dynamo_lite.planner.authentic import AuthenticRecords
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.planner import ChangePhase, OperationRecord, PauseRecord, TargetRecord
from dynamo_lite.runtime.sealed_records import UNSEALED, RecordSeals
from tests.builders import graph_secret

TARGET, PAUSE = names.planner_target_key("n"), names.planner_pause_key("n")


@pytest.fixture
def seals(tmp_path: Path) -> RecordSeals:
    return RecordSeals(graph_secret(tmp_path / "secret"))


@pytest.fixture
def drops() -> Counter[str]:
    return Counter()


@pytest.fixture
def records(seals: RecordSeals, drops: Counter[str]) -> AuthenticRecords:
    return AuthenticRecords(seals, lambda where: drops.update([where]))


def target(version: int, **manual: int) -> TargetRecord:
    return TargetRecord(counts={}, version=version, by="me", reason="", manual=manual)


def operation(id: int, phase: ChangePhase = "ordered") -> OperationRecord:
    return OperationRecord(
        id=id, kind="remove", component="VllmWorker", phase=phase, count=1, lease_id=7
    )


def operation_key(id: int) -> str:
    return names.planner_operation_key("n", id)


def test_what_is_not_sealed_for_its_key_changes_nothing(
    records: AuthenticRecords,
    seals: RecordSeals,
    drops: Counter[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    good = records.encoded(TARGET, target(5, VllmWorker=3))
    records.came(TARGET, good, TargetRecord)
    evil = encode_json(target(9, VllmWorker=0))
    another = RecordSeals(graph_secret(tmp_path / "another"))
    bad = {
        "unsealed": evil,
        "forged": another.sealed(TARGET, evil),
        "copied": seals.sealed(PAUSE, evil),
        "changed": good.replace(b'"VllmWorker":3', b'"VllmWorker":0'),
        "no record": b"nonsense",
    }
    assert good not in bad.values()
    for number, data in enumerate(bad.values(), 1):
        for _ in range(3):
            records.came(TARGET, data, TargetRecord)
            assert records.decoded(TARGET, data, TargetRecord) == target(5, VllmWorker=3)
        assert "not authentic" in records.refused[TARGET]
        assert drops == {"unauthentic": number}
    assert records.newest == 5
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1 and TARGET in warnings[0].getMessage()
    records.came(TARGET, records.encoded(TARGET, target(6)), TargetRecord)
    assert not records.refused and records.newest == 6


def test_a_process_that_starts_on_a_forged_record_has_none(
    records: AuthenticRecords, drops: Counter[str]
):
    for key, record in (
        (TARGET, target(5)),
        (operation_key(5), operation(5)),
        (PAUSE, PauseRecord(by="me")),
    ):
        data = encode_json(record)
        records.came(key, data, type(record))
        assert records.decoded(key, data, type(record)) is None
        assert not records.unreadable(key)
    assert drops == {"unauthentic": 3}


@pytest.mark.parametrize("deleted", [False, True])
def test_an_old_target_is_not_taken_again(records: AuthenticRecords, deleted: bool):
    old = records.encoded(TARGET, target(5, VllmWorker=1))
    records.came(TARGET, old, TargetRecord)
    records.came(TARGET, records.encoded(TARGET, target(6)), TargetRecord)
    if deleted:
        records.gone(TARGET)
    records.came(TARGET, old, TargetRecord)
    assert "version 5 came after version 6" in records.refused[TARGET]
    found = records.decoded(TARGET, old, TargetRecord)
    assert found == (None if deleted else target(6))


def test_a_read_that_is_ahead_of_the_watch_makes_nothing_old(
    records: AuthenticRecords, drops: Counter[str]
):
    first, second = (records.encoded(TARGET, target(version)) for version in (5, 6))
    assert records.decoded(TARGET, second, TargetRecord) == target(6)
    records.came(TARGET, first, TargetRecord)
    assert records.decoded(TARGET, second, TargetRecord) == target(6)
    records.came(TARGET, second, TargetRecord)
    assert not drops and not records.refused


def test_a_change_that_is_over_is_not_begun_again(records: AuthenticRecords, drops: Counter[str]):
    key = operation_key(5)
    ordered, asked = (records.encoded(key, operation(5, phase)) for phase in ("ordered", "asked"))
    records.came(TARGET, records.encoded(TARGET, target(5)), TargetRecord)
    records.came(key, ordered, OperationRecord)
    records.came(key, asked, OperationRecord)
    records.came(key, ordered, OperationRecord)
    assert "phase ordered came after asked" in records.refused[key]
    assert records.decoded(key, ordered, OperationRecord) == operation(5, "asked")
    records.gone(key)
    for data in (ordered, asked):
        records.came(key, data, OperationRecord)
        assert "change 5 is over" in records.refused[key]
        assert records.decoded(key, data, OperationRecord) is None
    assert drops == {"unauthentic": 3}
    # The next one is another one.
    later = records.encoded(operation_key(6), operation(6))
    records.came(operation_key(6), later, OperationRecord)
    assert records.decoded(operation_key(6), later, OperationRecord) == operation(6)


def test_a_change_of_before_the_start_is_not_begun_again(records: AuthenticRecords):
    """It was not there at the first look, and the versions have gone on since it began."""
    records.came(TARGET, records.encoded(TARGET, target(9)), TargetRecord)
    old, new = (records.encoded(operation_key(id), operation(id)) for id in (5, 9))
    records.came(operation_key(5), old, OperationRecord)
    records.came(operation_key(9), new, OperationRecord)
    assert list(records.refused) == [operation_key(5)]


def test_a_sealed_record_that_cannot_be_read_is_no_forgery(
    records: AuthenticRecords, seals: RecordSeals, drops: Counter[str]
):
    data = seals.sealed(PAUSE, b"[]")
    records.came(PAUSE, data, PauseRecord)
    assert records.decoded(PAUSE, data, PauseRecord) is None
    assert records.unreadable(PAUSE) and drops == {"record": 1}


def test_without_a_secret_every_record_counts_that_can_be_read(drops: Counter[str]):
    records = AuthenticRecords(UNSEALED, lambda where: drops.update([where]))
    assert records.encoded(TARGET, target(5)) == encode_json(target(5))
    for version in (6, 5):
        records.came(TARGET, encode_json(target(version)), TargetRecord)
        data = encode_json(target(version))
        assert records.decoded(TARGET, data, TargetRecord) == target(version)
    assert records.newest == 0 and not drops
    assert records.decoded(TARGET, b"[]", TargetRecord) is None
    assert drops == {"record": 1} and records.unreadable(TARGET)


def test_a_replaced_secret_makes_nothing_old(tmp_path: Path):
    path = tmp_path / "secret"
    old, new = b"o" * 32, b"n" * 32
    records = AuthenticRecords(RecordSeals(graph_secret(path, new, old)))
    before = RecordSeals(graph_secret(tmp_path / "before", old))
    for key, record in ((TARGET, target(5)), (PAUSE, PauseRecord(by="me"))):
        first = before.sealed(key, encode_json(record))
        again = records.encoded(key, record)
        assert first != again
        for data in (first, again):
            records.came(key, data, type(record))
            assert records.decoded(key, data, type(record)) == record
    assert not records.refused
