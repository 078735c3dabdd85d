"""Which secret the processes of a graph get."""

import contextlib
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

    keep: use the secret of an earlier start, if there is one, because records that are sealed with
    it still exist.
    """
    path = state_dir.resolve() / "secret"
    if keep:
        with contextlib.suppress(StartupError):
            GraphSecret(path)
            return path
    write_private(path, new_secret())
    return path


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
