"""Files with the credentials of a client of NATS or etcd.

Each must be readable by its owner only, as the graph's secret. No log line or error contains their
contents.
"""

import os
from pathlib import Path

from dynamo_lite.runtime.secret import open_to_others

_LONGEST_BYTES = 64 << 10
_JWT = b"-----BEGIN NATS USER JWT-----"


class BadCredentials(ValueError):
    """A file that cannot be used; the text says which, why, and what to do."""


def read_login(path: Path) -> tuple[str, str | None]:
    """User and password of a file with one line, USER:PASSWORD. Without a colon the line is a
    token, and the password None. Raises BadCredentials."""
    lines = _read("login", path).split(b"\n")
    try:
        user, colon, password = lines[0].rstrip(b"\r").decode().partition(":")
    except UnicodeDecodeError:
        user, colon, password = "", "", ""
    if not user or any(lines[1:]):
        raise BadCredentials(f"login={path} needs one line, USER:PASSWORD or a token of NATS")
    return user, password if colon else None


def user_jwt(path: Path) -> bytearray:
    """The JWT of a credentials file of NATS. Raises BadCredentials."""
    lines = _read("creds", path).splitlines()
    try:
        token = lines[lines.index(_JWT) + 1].strip()
    except (ValueError, IndexError):
        token = b""
    if not token:
        problem = f"creds={path} has no JWT of a user; make the file with `nsc generate creds`"
        raise BadCredentials(problem)
    return bytearray(token)


def check_nkey(path: Path) -> Path:
    """`path`, if it is a file for its owner only. Raises BadCredentials."""
    _read("nkey", path)
    return path


def _read(name: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            status, content = os.fstat(file.fileno()), file.read(_LONGEST_BYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: a name with a null byte
        why = exc.strerror if isinstance(exc, OSError) else exc
        shown = str(path).replace("\0", "%00")
        raise BadCredentials(f"{name}={shown} cannot be read ({why})") from exc
    if open_to_others(status):
        raise BadCredentials(f"{name}={path} is open to other users: chmod 600 {path}")
    if len(content) > _LONGEST_BYTES:
        raise BadCredentials(f"{name}={path} is longer than {_LONGEST_BYTES} bytes")
    return content
