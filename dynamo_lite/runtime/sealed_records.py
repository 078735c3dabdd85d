"""Records in the store that are sealed with the graph's secret.

A sealed record is JSON: `seal`, a tag of `runtime/secret.py` in hexadecimal, and `record`, the
bytes that it covers. The seal covers the key in the store, too, so a record that was copied to
another key is rejected.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.secret import TAG_BYTES, GraphSecret

_Seal = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{2 * TAG_BYTES}}}\Z")]


class _SealedRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seal: _Seal
    record: msgspec.Raw


class RecordSeals:
    """Seals with the first key of the secret; seals with either key hold.

    Without a secret records are written unsealed, and every record is opened, its seal unchecked.
    """

    def __init__(self, secret: GraphSecret | None):
        self._secret = secret

    @classmethod
    def of_file(cls, secret_file: str | Path | None) -> "RecordSeals":
        """Raises StartupError for a secret file that cannot be used. None: no secret."""
        return cls(None if secret_file is None else GraphSecret(Path(secret_file)))

    @property
    def checked(self) -> bool:
        """Whether there is a secret."""
        return self._secret is not None

    def sealed(self, key: str, record: bytes) -> bytes:
        """record: JSON, to be put at `key`."""
        if self._secret is None:
            return record
        seal = self._secret.tag(_context(key), record).hex()
        return encode_json(_SealedRecord(seal=seal, record=msgspec.Raw(record)))

    def opened(self, key: str, data: bytes) -> bytes:
        """The record that `data`, found at `key`, holds. Raises ProtocolError if it is not
        authentic."""
        try:
            found = decode_json(data, _SealedRecord)
        except ProtocolError as exc:
            if self._secret is None:
                return data
            raise ProtocolError("not authentic: it has no seal of the graph's secret") from exc
        record = bytes(found.record)
        if self._secret is not None and not self._secret.verify(
            _context(key), bytes.fromhex(found.seal), record
        ):
            raise ProtocolError(
                "not authentic: its seal was not made with the graph's secret for this record"
            )
        return record


#: Of a graph without a secret.
UNSEALED = RecordSeals(None)


def is_sealed(data: bytes) -> bool:
    """Whether there is a seal, right or wrong."""
    try:
        decode_json(data, _SealedRecord)
    except ProtocolError:
        return False
    return True


def _context(key: str) -> bytes:
    return b"record " + key.encode()
