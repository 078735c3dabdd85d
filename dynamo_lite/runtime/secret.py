"""The secret that all processes of a graph share, and the authentication of messages with it.

The secret is a file with one or two keys of 32 bytes, in hexadecimal, one per line. The first key
authenticates what is sent. Messages under either key are accepted, so a key is replaced without a
stop: write OLD, NEW everywhere; then NEW, OLD; then NEW. A running process sees a changed file
within a second.

An authenticated message is a tag of 16 bytes, keyed BLAKE2b (RFC 7693), and the message. The tag
covers a context, too, such as the subject, so a message is rejected in any other context.
"""

import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from dynamo_lite.protocol.errors import ProtocolError, StartupError
from dynamo_lite.runtime.log_limit import LogLimit

logger = logging.getLogger(__name__)

TAG_BYTES = 16
_KEY_BYTES = 32
_MOST_KEYS = 2
_CHECK_FILE_S = 1.0
_WARN_S = 60.0


def new_secret() -> bytes:
    """The content of a new secret file, with one random key."""
    return secrets.token_hex(_KEY_BYTES).encode() + b"\n"


class GraphSecret:
    """Authenticates messages with the keys of a secret file. Usable from any thread.

    Raises StartupError for a file that cannot be read, is open to other users, or has other
    contents. now: monotonic.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic):
        self._path, self._now = path, now
        self._stamp, self._keys = _read(path)
        self._check_at = now() + _CHECK_FILE_S
        self._log_limit = LogLimit(_WARN_S)

    def protect(self, context: bytes, message: bytes) -> bytes:
        """The tag and the message."""
        return self.tag(context, message) + message

    def tag(self, context: bytes, message: bytes | memoryview) -> bytes:
        return _tag(self._current()[0], context, message)

    def open(self, context: bytes, protected: bytes) -> bytes:
        """The message of `protected`. Raises ProtocolError unless its tag is right."""
        message = memoryview(protected)[TAG_BYTES:]
        if not self.verify(context, protected[:TAG_BYTES], message):
            raise ProtocolError("not authentic: its sender does not have this graph's secret")
        return bytes(message)

    def verify(self, context: bytes, tag: bytes, message: bytes | memoryview) -> bool:
        """Whether `tag` was made for this context and message with one of the keys."""
        return any(hmac.compare_digest(tag, _tag(key, context, message)) for key in self._current())

    def _current(self) -> tuple[bytes, ...]:
        if (now := self._now()) >= self._check_at:
            self._check_at = now + _CHECK_FILE_S
            self._read_again()
        return self._keys

    def _read_again(self) -> None:
        try:
            if _stamp(os.stat(self._path)) != self._stamp:
                self._stamp, self._keys = _read(self._path)
                logger.info("the graph's secret was replaced: %d keys", len(self._keys))
        except (OSError, StartupError) as exc:
            if self._log_limit.allow() is not None:
                logger.warning(
                    "the secret file cannot be read again, the old secret stays in use: %s", exc
                )


def _tag(key: bytes, context: bytes, message: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(len(context).to_bytes(4, "big"), key=key, digest_size=TAG_BYTES)
    digest.update(context)
    digest.update(message)
    return digest.digest()


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> tuple[tuple[int, int, int], tuple[bytes, ...]]:
    """The file's stamp and keys. Raises StartupError."""
    try:
        with path.open("rb") as file:
            status, content = os.fstat(file.fileno()), file.read(4096)
    except OSError as exc:
        raise StartupError(f"cannot read the secret file {path}: {exc.strerror}") from exc
    try:
        keys = tuple(bytes.fromhex(line) for line in content.decode("ascii").split())
    except ValueError:
        keys = ()
    if open_to_others(status):
        raise StartupError(f"the secret file {path} is open to other users: chmod 600 {path}")
    if not 0 < len(keys) <= _MOST_KEYS or any(len(key) != _KEY_BYTES for key in keys):
        raise StartupError(
            f"the secret file {path} must have one or two lines of {2 * _KEY_BYTES} hexadecimal"
            " digits each, for example from: openssl rand -hex 32"
        )
    return _stamp(status), keys


def open_to_others(status: os.stat_result) -> bool:
    """Whether other users can read this file. A group can, if it is a mounted secret volume of
    Kubernetes: readable by a group only, and not ours."""
    mode = stat.S_IMODE(status.st_mode)
    mounted = status.st_uid != os.geteuid() and not mode & 0o007
    return bool(mode & 0o077) and not mounted
