"""Which secret the processes of a graph get."""

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.address import is_loopback, parse_nats_url, redact
from dynamo_lite.runtime.secret import GraphSecret, new_secret
from dynamo_lite.serve.run_state import RunState, write_private

_MAKE_ONE = (
    "make one (openssl rand -hex 32 > FILE; chmod 600 FILE) and name it on every host with"
    " --secret-file FILE"
)


def made_secret(state_dir: Path, *, keep: bool = False) -> Path:
    """Makes the secret of a graph with its own nats-server.

    keep: use the secret that is there, if there is one, because records that are sealed with it
    still exist.

    Raises ConfigError, and changes nothing, if another file would be overwritten than one that an
    earlier start has made; StartupError if it cannot be written.
    """
    path = state_dir.resolve() / "secret"
    if keep:
        with contextlib.suppress(StartupError):
            return given_secret(path)
    # A secret that an operator made has the same form, so starts record what they make.
    record = path.parent / "embedded" / "made-secrets"
    if reason := _why_foreign(path, record):
        raise ConfigError(
            [
                f"--state-dir: {path} is not as an earlier start has made it: {reason}; it was not"
                " overwritten; move it, name it with --secret-file, or choose another --state-dir"
            ]
        )
    secret = new_secret()
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        made = [secret, *([path.read_bytes()] if path.exists() else [])]
        # The record comes first and names both: a start may end between the two.
        write_private(record, "".join(f"{_digest(one)}\n" for one in made).encode())
        write_private(path, secret)
    except OSError as exc:
        raise StartupError(f"cannot write the secret {path}: {exc}") from exc
    return path


def _digest(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def _why_foreign(path: Path, record: Path) -> str:
    """Why this file is not one that `made_secret` has written; empty if it is, or if there is none.

    record: the digests of secrets that starts have made, the one in `path` among them.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "it is no regular file"
        if status.st_uid != os.geteuid():
            return "it belongs to another user"
        made = record.read_text().split() if record.exists() else []
        return "" if _digest(path.read_bytes()) in made else "it has been changed, or was put there"
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as exc:
        return f"it cannot be read: {exc}"


def given_secret(path: Path) -> Path:
    """Raises StartupError for a secret file that cannot be used.

    Links are not resolved: Kubernetes replaces a mounted Secret by changing the target of a link.
    """
    GraphSecret(path)
    return path.absolute()


def running_secret(running: RunState | None, url: str) -> Path | None:
    """The secret of the graph that runs on the same state directory and uses this NATS or etcd;
    None without one."""
    same = running is not None and url in (running.nats, running.etcd) and running.secret
    return Path(running.secret) if running is not None and same else None


def check_exposure(bind_host: str, nats_url: str | None, secret: Path | None) -> None:
    """Raises ConfigError if others could reach processes that do not authenticate messages: on
    their own address, or through the broker of another host.

    nats_url: well formed; None for an embedded server, which answers only its own graph.
    """
    if secret is not None:
        return
    exposed: list[str] = []
    if not is_loopback(bind_host):
        exposed.append(
            f"Graph.bind-host: {bind_host} is reachable from other hosts, and without a secret"
            f" anyone who reaches it can send requests; {_MAKE_ONE}"
        )
    if nats_url is not None and not parse_nats_url(nats_url).on_loopback:
        exposed.append(
            f"--nats-url: {redact(nats_url)} is another host, and without a secret anyone who may"
            f" use that NATS can send jobs and answers to this graph; {_MAKE_ONE}"
        )
    if exposed:
        raise ConfigError(exposed)
