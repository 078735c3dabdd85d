"""Starts what the files of `deploy/` start in containers, on this host.

A container's root is a folder with links to what is mounted into it. Of its command line and files
only the paths and the addresses of other containers are changed.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats, program
from tests.deploy.command_lines import DEPLOY
from tests.ports import reserved_port

#: Of this installation.
COMMAND = f"{sys.executable} -m dynamo_lite.cli.cli"
#: What may stand in front of a path: `--option=`, `?ca=`, a space or a quote.
_PATH = re.compile(r"(?<=[=\s\"'])/[\w./-]+")


def make_secrets(folder: Path, *names: str) -> Path:
    """The folder, with what `deploy/make-secrets` makes."""
    subprocess.run(
        [DEPLOY / "make-secrets", folder, *names],
        env={**os.environ, "DYNAMO_LITE": COMMAND},
        check=True,
        capture_output=True,
        timeout=120,
    )
    return folder


@dataclass(frozen=True)
class Container:
    """root: of its file system, here. mounts: what is mounted at each path. addresses: of a server
    as a container writes it, HOST:PORT, to where it is here."""

    root: Path
    mounts: Mapping[str, Path]
    addresses: Mapping[str, str]

    def make(self) -> None:
        for target, source in self.mounts.items():
            path = self.path(target)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not source.exists():
                source.mkdir(parents=True)
            if not path.is_symlink():
                path.symlink_to(source.resolve())

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def here(self, text: str) -> str:
        """An argument, a URL or a file's text of this container. Raises ValueError for a path at
        which nothing is mounted."""
        for there, address in self.addresses.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(there)}(?!\d)", address, text)
        return _PATH.sub(lambda found: str(self.path(self._mounted(found[0]))), text)

    def _mounted(self, path: str) -> str:
        if not any(path == target or path.startswith(f"{target}/") for target in self.mounts):
            raise ValueError(f"nothing is mounted at {path}")
        return path


class ShippedNats(EmbeddedNats):
    """config: the path of its configuration in the container. content: of that file."""

    def __init__(self, container: Container, config: str, content: str, port: int):
        super().__init__(container.root, port)
        self._container, self._config, self._content = container, config, content

    @property
    def config_file(self) -> Path:
        return self._container.path(self._config)

    def write_config(self) -> None:
        self.config_file.parent.mkdir(parents=True, exist_ok=True)
        text = self._container.here(self._content)
        text = re.sub(r'(?m)^( *"?port"?:) 4222', rf"\1 {self.port}", text)
        self.config_file.write_text(text)

    def _command(self) -> list[str]:
        self.write_config()
        return [program("nats-server"), "-c", str(self.config_file)]


class ShippedEtcd(EmbeddedEtcd):
    """arguments: of etcd in the container. ready: whether its probe succeeds."""

    def __init__(
        self, container: Container, arguments: Sequence[str], ready: Callable[[], bool], port: int
    ):
        super().__init__(container.root, port)
        self._arguments = [container.here(argument) for argument in arguments]
        self._ready = ready

    def _command(self) -> list[str]:
        return [program("etcd"), *self._arguments, "--unsafe-no-fsync", "--log-level=warn"]

    async def _is_ready(self) -> bool:
        return await asyncio.to_thread(self._ready)


def free_ports(*addresses: str) -> dict[str, str]:
    """A free address of this host for each."""
    return {address: f"127.0.0.1:{reserved_port()}" for address in addresses}


@asynccontextmanager
async def together(
    servers: Sequence[ShippedNats | ShippedEtcd],
) -> AsyncIterator[ShippedNats | ShippedEtcd]:
    """Starts them at the same time: the members of a cluster wait for each other. Yields one."""
    async with AsyncExitStack() as stack:
        for server in servers:
            stack.push_async_exit(server.__aexit__)
        async with asyncio.TaskGroup() as starting:
            for server in servers:
                starting.create_task(server.__aenter__())
        yield servers[0]
