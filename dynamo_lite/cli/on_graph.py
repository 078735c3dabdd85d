"""The options by which each command finds its graph."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dynamo_lite.cli import listing
from dynamo_lite.cli.arguments import (
    DEFAULT_STATE_DIR,
    CertificatesDir,
    EtcdUrl,
    Namespace,
    NatsUrl,
    StateDir,
)
from dynamo_lite.cli.listing import Place
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.permissions import OPERATOR
from dynamo_lite.runtime.certificates import with_files
from dynamo_lite.runtime.store import Store
from dynamo_lite.serve.run_state import read_run, running_certificates

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OnGraph:
    etcd_url: EtcdUrl = None
    nats_url: NatsUrl = None
    certificates: CertificatesDir = None
    state_dir: StateDir = DEFAULT_STATE_DIR
    namespace: Namespace = None

    def place(self) -> Place:
        return listing.find_place(self.state_dir, self.etcd_url, self.namespace, self.certificates)

    def nats(self) -> str:
        """The URL of NATS, with the operator's certificate. Raises StartupError."""
        running, folder = read_run(self.state_dir), self.certificates
        url = self.nats_url or (running.nats if running else None)
        if url is None:
            raise StartupError(f"no graph runs on {self.state_dir}; name a server with --nats-url")
        if folder is None and running is not None:
            folder = running_certificates(running, running.namespace)
        return with_files(url, folder, OPERATOR)

    def on_store(self, work: Callable[[Store, Place], Awaitable[T]]) -> T:
        return listing.on_store(
            self.state_dir, self.etcd_url, self.namespace, self.certificates, work
        )


def on_graph(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command these options, but for those `without`. It gets an OnGraph as `graph`."""
    options = inspect.signature(OnGraph, eval_str=True).parameters.values()
    added = [option for option in options if option.name not in without]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            found = {option.name: given.pop(option.name) for option in added}
            command(graph=OnGraph(**found), **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        every = [*(one for one in own if one.name != "graph"), *added]
        keyword = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in every]
        run.__annotations__ = {one.name: one.annotation for one in every}
        vars(run)["__signature__"] = inspect.Signature(keyword)
        return run

    return decorated
