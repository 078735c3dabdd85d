"""Files with the credentials of a client of NATS or etcd.

Each must be readable by its owner only. No log line or error contains their contents.
"""

import os
import stat
from pathlib import Path

import nkeys

_LONGEST_BYTES = 64 << 10
_JWT, _SEED = b"-----BEGIN NATS USER JWT-----", b"-----BEGIN USER NKEY SEED-----"


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
    """The JWT of a credentials file of NATS, which has a seed, too. Raises BadCredentials."""
    lines = _read("creds", path).splitlines()
    token, seed = (
        lines[lines.index(mark) + 1].strip() if mark in lines[:-1] else b""
        for mark in (_JWT, _SEED)
    )
    if not token or not _is_seed(seed):
        raise BadCredentials(
            f"creds={path} needs the JWT and the NKey seed of a user: `nsc generate creds`"
        )
    return bytearray(token)


def check_nkey(path: Path) -> Path:
    """`path`, if it has the seed of a user's NKey. Raises BadCredentials."""
    if not _is_seed(_read("nkey", path)):
        raise BadCredentials(
            f"nkey={path} is not the seed of a user's NKey (SU...): `nk -gen user`"
        )
    return path


def open_to_others(status: os.stat_result) -> bool:
    """Whether other users can read this file. A group can, if it is a mounted secret volume of
    Kubernetes: readable by a group only, and not ours."""
    mode = stat.S_IMODE(status.st_mode)
    mounted = status.st_uid != os.geteuid() and not mode & 0o007
    return bool(mode & 0o077) and not mounted


def _is_seed(seed: bytes) -> bool:
    try:
        pair = nkeys.from_seed(bytearray(seed.strip()))
        return bytes(pair.public_key).startswith(b"U")
    except Exception:  # of several packages
        return False


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
