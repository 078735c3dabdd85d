"""Which secret the processes of a graph get."""

import contextlib
import os
import re
import stat
from pathlib import Path

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.address import is_loopback, parse_nats_url, redact
from dynamo_lite.runtime.secret import GraphSecret, new_secret
from dynamo_lite.serve.embedded_folders import MARKER, folder_of, is_marked, mark
from dynamo_lite.serve.run_state import RunState, write_private

_MAKE_ONE = (
    "make one (openssl rand -hex 32 > FILE; chmod 600 FILE) and name it on every host with"
    " --secret-file FILE"
)


#: What `new_secret` returns.
_MADE = re.compile(rb"[0-9a-f]{64}\n")


def made_secret(state_dir: Path, *, keep: bool = False) -> Path:
    """Makes the secret of a graph with its own nats-server.

    keep: use the secret of an earlier start, if there is one, because records that are sealed with
    it still exist.

    Raises ConfigError, and changes nothing, if the file is not from an earlier start.
    """
    path = state_dir.resolve() / "secret"
    if keep:
        with contextlib.suppress(StartupError):
            GraphSecret(path)
            return path
    folder = folder_of(path.parent, "nats")
    if reason := _why_foreign(path, folder):
        raise ConfigError(
            [
                f"--state-dir: {path} is not from an earlier start: {reason}; it was not"
                " overwritten; move it, name it with --secret-file, or choose another --state-dir"
            ]
        )
    mark(folder)
    write_private(path, new_secret())
    return path


def _why_foreign(path: Path, folder: Path) -> str:
    """Why `made_secret` has not written this file; empty if it has, or if there is none.

    A secret that an operator made has the same form. So the nats-server's folder decides: its
    marker file is written before the first secret.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "it is no regular file"
        if status.st_uid != os.geteuid():
            return "it belongs to another user"
        content = path.read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return f"it cannot be read: {exc.strerror}"
    if _MADE.fullmatch(content) is None:
        return "it does not have one line of 64 hexadecimal digits"
    return "" if is_marked(folder) else f"{folder} has no marker file {MARKER}"


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
