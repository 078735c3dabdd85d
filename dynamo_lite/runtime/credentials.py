"""Files with the credentials of a client of NATS or etcd.

Each must be readable by its owner only. No log line or error contains their contents.
"""

import os
import stat
from pathlib import Path

import nkeys

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.tls import read_file

_JWT, _SEED = b"-----BEGIN NATS USER JWT-----", b"-----BEGIN USER NKEY SEED-----"


def read_login(path: Path) -> tuple[str, str | None]:
    """User and password of a file with one line, USER:PASSWORD. Without a colon the line is a
    token, and the password None. Raises ConfigError."""
    lines = _read("login", path).split(b"\n")
    try:
        user, colon, password = lines[0].rstrip(b"\r").decode().partition(":")
    except UnicodeDecodeError:
        user, colon, password = "", "", ""
    if not user or any(lines[1:]):
        raise ConfigError([f"login={path} needs one line, USER:PASSWORD or a token of NATS"])
    return user, password if colon else None


def user_jwt(path: Path) -> bytearray:
    """The JWT of a credentials file of NATS, which has a seed, too. Raises ConfigError."""
    lines = _read("creds", path).splitlines()
    token, seed = (
        lines[lines.index(mark) + 1].strip() if mark in lines[:-1] else b""
        for mark in (_JWT, _SEED)
    )
    if not token or not _is_seed(seed):
        needed = "the JWT and the NKey seed of a user: `nsc generate creds`"
        raise ConfigError([f"creds={path} needs {needed}"])
    return bytearray(token)


def check_nkey(path: Path) -> Path:
    """`path`, if it has the seed of a user's NKey. Raises ConfigError."""
    if not _is_seed(_read("nkey", path)):
        mistake = f"nkey={path} is not the seed of a user's NKey (SU...): `nk -gen user`"
        raise ConfigError([mistake])
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
    content = read_file(name, path)
    assert content is not None
    if open_to_others(path.stat()):
        raise ConfigError([f"{name}={path} is open to other users: chmod 600 {path}"])
    return content
