"""NATS and etcd as other people run them: with TLS, client certificates and users."""

import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import trustme

from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats, etcdctl

PASSWORD = "s3cret/@,x"
#: The user of both servers, as a URL has it.
LOGIN = "me:s3cret%2F%40%2Cx"
USERS = f'authorization {{ user: me, password: "{PASSWORD}" }}\n'


@dataclasses.dataclass(frozen=True)
class Certificates:
    """PEM files in one folder: the authority's (and a stranger's), the servers' for
    `addresses` (and one for another name), a client's."""

    folder: Path
    addresses: Sequence[str] = ("localhost", "127.0.0.1")

    def make(self) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.folder / "ca.pem")
        trustme.CA().cert_pem.write_to_path(self.folder / "stranger.pem")
        for name, subject, hosts in (
            ("server", None, self.addresses),
            ("misnamed", None, ("elsewhere",)),
            ("client", "me", ("me",)),
        ):
            issued = authority.issue_cert(*hosts, common_name=subject)
            issued.cert_chain_pems[0].write_to_path(self.folder / f"{name}.pem")
            issued.private_key_pem.write_to_path(self.folder / f"{name}-key.pem")

    def files(self, name: str = "server") -> tuple[Path, Path]:
        """A certificate and its key."""
        return self.folder / f"{name}.pem", self.folder / f"{name}-key.pem"

    def query(self, *, ca: str = "ca", client: bool = False) -> str:
        own = f"&cert={self.folder}/client.pem&key={self.folder}/client-key.pem"
        return f"?ca={self.folder}/{ca}.pem{own if client else ''}"


class TlsEtcd(EmbeddedEtcd):
    """etcd over TLS; clients need a certificate if `demand` is set."""

    certificates: Certificates
    certificate = "server"
    demand = False

    @property
    def listening(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def _command(self) -> list[str]:
        certificate, key = self.certificates.files(self.certificate)
        command = [*super()._command(), "--cert-file", str(certificate), "--key-file", str(key)]
        if self.demand:
            authority = str(self.certificates.folder / "ca.pem")
            command += ["--client-cert-auth", "--trusted-ca-file", authority]
        # A test may need a server with a wrong certificate.
        self._context = context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(*self.certificates.files("client"))
        return command

    async def control(self, *command: str, **login: str) -> None:
        """etcdctl on this server."""
        url = f"{self.listening}{self.certificates.query(client=True)}"
        await etcdctl(url, *command, timeout_s=20, **login)


class TlsNats(EmbeddedNats):
    """nats-server with TLS and users, as `extra` has it."""

    extra = ""

    def _command(self) -> list[str]:
        command = super()._command()
        with Path(command[-1]).open("a") as config:
            config.write(self.extra)
        return command


def nats_tls(
    certificates: Certificates, *, certificate: str = "server", demand: bool = False
) -> str:
    """The part of nats-server's configuration."""
    folder = certificates.folder
    more = f'ca_file: "{folder}/ca.pem", verify: true' if demand else ""
    pair = f'cert_file: "{folder}/{certificate}.pem", key_file: "{folder}/{certificate}-key.pem"'
    return f"tls {{ {pair}, {more} }}\n"


@contextlib.asynccontextmanager
async def etcd(
    folder: Path,
    certificates: Certificates,
    *,
    certificate: str = "server",
    demand: bool = False,
    users: bool = False,
    port: int = 0,
) -> AsyncIterator[TlsEtcd]:
    """port: of the server that ran in `folder` before."""
    server = TlsEtcd(folder, port)
    server.certificates, server.certificate, server.demand = certificates, certificate, demand
    async with server:
        if users:
            await add_users(server)
        yield server


async def add_users(server: TlsEtcd) -> None:
    """`me` may use the prefix n/; root everything."""
    for command in (
        ("user", "add", "root:root"),
        ("user", "grant-role", "root", "root"),
        ("role", "add", "graph"),
        ("role", "grant-permission", "graph", "--prefix=true", "readwrite", "n/"),
        ("user", "add", f"me:{PASSWORD}"),
        ("user", "grant-role", "me", "graph"),
        ("auth", "enable"),
    ):
        await server.control(*command)


@contextlib.asynccontextmanager
async def nats(folder: Path, extra: str) -> AsyncIterator[TlsNats]:
    server = TlsNats(folder)
    server.extra = extra
    async with server:
        yield server


def etcd_url(server: TlsEtcd, query: str, login: str = "") -> str:
    return f"https://{login and login + '@'}127.0.0.1:{server.port}{query}"


def nats_url(server: TlsNats, query: str, login: str = "") -> str:
    return f"tls://{login and login + '@'}localhost:{server.port}{query}"
