"""Which of the planner's records in etcd are believed, where the graph has a secret.

A record needs the seal of the secret for its key, and may not be older than what this process has
seen. A writer to etcd without the secret can therefore order nothing. The leader's record is not
sealed: it orders nothing, and a writer to etcd could also delete it. A pause has no age: it
orders nothing, too.

The numbers of the orders show which record is older: each version of the target record is higher
than the one before, and each change takes a new version as its id before its record is stored.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.planner import OperationRecord, PauseRecord, TargetRecord
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.sealed_records import UNSEALED, RecordSeals

logger = logging.getLogger(__name__)

#: A change goes through its phases in this order.
_PHASES = ("ordered", "leaving", "asked", "withdrawing")

R = TypeVar("R", TargetRecord, OperationRecord, PauseRecord)


@dataclass(frozen=True)
class _Refused:
    data: bytes
    #: unauthentic, or record: it is authentic and cannot be read.
    kind: str
    why: str


class AuthenticRecords:
    """Encodes and decodes records; the parts of a planner share one. Without a secret every record
    that can be read is believed.

    A watch calls `came` and `gone` in the order of the changes. Other reads may be ahead of it, so
    they change nothing here. newest: target records with versions below it are old.
    """

    def __init__(
        self, seals: RecordSeals = UNSEALED, on_drop: OnDrop = uncounted, *, newest: int = 0
    ):
        self._seals, self._on_drop = seals, on_drop
        self._log_limit = LogLimit()
        self._newest = newest
        #: Changes with ids below this one that were not there are over.
        self._over = 0
        #: By key: the last record that was believed, encoded and decoded.
        self._believed: dict[str, tuple[bytes, msgspec.Struct]] = {}
        #: By key: what is there and is not believed.
        self._refused: dict[str, _Refused] = {}

    def __repr__(self) -> str:
        return f"AuthenticRecords(newest={self._newest}, refused={sorted(self._refused)})"

    @property
    def newest(self) -> int:
        """The highest version of the target record so far; 0 without a secret."""
        return self._newest

    @property
    def refused(self) -> Mapping[str, str]:
        """The keys whose present record is not believed, and why."""
        return {key: refused.why for key, refused in self._refused.items()}

    def unreadable(self, key: str) -> bool:
        """Whether the present record is authentic and cannot be read."""
        return key in self._refused and self._refused[key].kind == "record"

    def encoded(self, key: str, record: msgspec.Struct) -> bytes:
        return self._seals.sealed(key, encode_json(record))

    def decoded(self, key: str, data: bytes | None, kind: type[R]) -> R | None:
        """The record that `data`, read at `key`, holds; None without one and if it cannot be read.

        For one that is not authentic: the last one before it that was, if any. What is not believed
        is counted and logged once.
        """
        if data is None:
            return None
        before = self._before(key, kind)
        match self._judged(key, data, kind, before):
            case _Refused() as refused:
                self._refuse(key, refused)
                return before if refused.kind == "unauthentic" else None
            case record:
                return record

    def came(self, key: str, data: bytes, kind: type[R]) -> None:
        """The watch has this record."""
        judged = self._judged(key, data, kind, self._before(key, kind))
        if isinstance(judged, _Refused):
            self._refuse(key, judged)
            return
        self._refused.pop(key, None)
        self._believed[key] = data, judged
        if self._seals.checked and isinstance(judged, TargetRecord):
            self._newest = max(self._newest, judged.version)

    def gone(self, key: str) -> None:
        """The key was deleted. A change that was there is over."""
        self._refused.pop(key, None)
        _, record = self._believed.pop(key, (b"", None))
        if self._seals.checked and isinstance(record, OperationRecord):
            self._over = max(self._over, record.id + 1)

    def _before(self, key: str, kind: type[R]) -> R | None:
        _, record = self._believed.get(key, (b"", None))
        return record if isinstance(record, kind) else None

    def _judged(self, key: str, data: bytes, kind: type[R], before: R | None) -> R | _Refused:
        if before is not None and self._believed[key][0] == data:
            return before
        try:
            content = self._seals.opened(key, data)
        except ProtocolError as exc:
            return _Refused(data, "unauthentic", str(exc))
        try:
            record = decode_json(content, kind)
        except ProtocolError as exc:
            return _Refused(data, "record", str(exc))
        if self._seals.checked and (why := self._old(record, before)):
            return _Refused(data, "unauthentic", f"not authentic: {why}")
        return record

    def _old(self, record: msgspec.Struct, before: msgspec.Struct | None) -> str:
        """Why it is older than what was there; empty if it is not."""
        match record:
            case TargetRecord(version=version) if version < self._newest:
                return f"version {version} came after version {self._newest}"
            case OperationRecord():
                if isinstance(before, OperationRecord):
                    if _PHASES.index(record.phase) < _PHASES.index(before.phase):
                        return f"phase {record.phase} came after {before.phase}"
                elif record.id < max(self._newest, self._over):
                    return f"change {record.id} is over"
            case _:
                pass
        return ""

    def _refuse(self, key: str, refused: _Refused) -> None:
        known, self._refused[key] = self._refused.get(key), refused
        if known is not None and known.data == refused.data:
            return
        self._on_drop(refused.kind)
        if (more := self._log_limit.allow()) is not None:
            logger.warning("%s is ignored (and %d before it): %s", key, more, refused.why)
