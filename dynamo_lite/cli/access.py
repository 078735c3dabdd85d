"""`dynamo-lite access`: who may use NATS and etcd, and with which credentials; certificates.

Prints users with the least rights, as nats-server's configuration and as commands of etcdctl, and
makes those of etcd.
"""

import asyncio
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from dynamo_lite.cli.arguments import Namespace
from dynamo_lite.cli.listing import OnGraph, checked_namespace, on_graph
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.permissions import Permissions, all_permissions, inbox_of
from dynamo_lite.runtime.address import redact
from dynamo_lite.runtime.credentials import read_login
from dynamo_lite.serve.embedded import etcdctl

_ROOT = "root"
#: Passwords are hashed slowly on purpose.
_ANSWER_S = 30

app = typer.Typer(
    no_args_is_help=True,
    help="""A graph's certificates, and its users of NATS and etcd.

    \b
    dynamo-lite access certs certificates --namespace dynamo
    dynamo-lite access certs certificates --namespace dynamo --server nats --host nats.example
    dynamo-lite access nats --namespace dynamo > users.conf
    dynamo-lite access etcd --namespace dynamo
    """,
)


@app.command("etcd")
@on_graph
def etcd(
    graph: OnGraph,
    make: Annotated[
        Path | None,
        typer.Option(
            help="Make the users at --etcd-url, and turn authentication on. This folder has the"
            " passwords: for each user, and for `root`, a file of its name that contains"
            " USER:PASSWORD. What exists stays; a password that differs is changed, but not that of"
            " `root`, as whom this command logs in: for it `etcdctl user passwd root`.",
        ),
    ] = None,
) -> None:
    """Print the commands of `etcdctl` that make a user of etcd for each component.

    A user may read and change only the keys that its component needs. The commands of
    `dynamo-lite` use `Operator`. With --make the command makes the users itself.
    """
    if make is not None and graph.etcd_url is None:
        raise ConfigError(["--make needs --etcd-url"])
    name = _named(graph.namespace)
    permissions = all_permissions(name).values()
    if make is not None:
        asyncio.run(make_users(graph.place().etcd_url, name, permissions, make))
        print(f"{len(permissions)} users of namespace {name}; authentication is on")
    else:
        print(etcd_commands(name, permissions), end="")


@app.command("nats")
def nats(namespace: Namespace = None) -> None:
    """Print the part of nats-server's configuration that has a user for each component.

    A user may publish and subscribe only to the subjects that its component needs, and to an
    inbox of its own, which `?inbox=` in the component's NATS URL names. `Operator` is for the
    commands of `dynamo-lite`.
    """
    name = _named(namespace)
    print(f"accounts {{\n{nats_account(name, all_permissions(name).values())}}}")


@app.command("certs")
def certs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder; it is made if it is missing.")
    ],
    namespace: Namespace = None,
    component: Annotated[
        list[str] | None,
        typer.Option(
            "--component",
            help="Make only the certificate of this component, or of a service of yours; may be"
            " repeated.",
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host", help="A name or address to put into the certificates; may be repeated."
        ),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server", help="Make only that of your own server: nats or etcd; may be repeated."
        ),
    ] = None,
) -> None:
    """Make a graph's authority, and a certificate for each component.

    The authority is ca.pem with ca-key.pem, a certificate COMPONENT.pem with COMPONENT-key.pem.
    Copy ca.pem and the two files of each component to the hosts where it runs, into the folder
    that Graph.certificates names. No process needs ca-key.pem: keep it away from them.

    Files that exist are kept. To renew a certificate, remove its two files and run the command
    again. Running processes use new files from their next connection on.

    With --server: nats-server.pem or etcd-server.pem and its key, for localhost and each --host.
    """
    from dynamo_lite.serve.certificate_folder import make_certificates

    name, hosts = _named(namespace), host or []
    if server is not None:
        if component or set(server) - {"nats", "etcd"}:
            raise ConfigError(["--server is nats or etcd, and goes without --component"])
        names = [f"{one}-server" for one in server]
        made = make_certificates(
            folder, name, names, ["localhost", "127.0.0.1", *hosts], servers=True
        )
    else:
        if wrong := [one for one in component or () if not one.isalnum() or not one.isascii()]:
            raise ConfigError([f"--component {one}: not the name of a service" for one in wrong])
        made = make_certificates(folder, name, component or all_permissions(name), hosts)
    print(f"{folder}: made {', '.join(made) or 'nothing: all are there'}")


def _named(namespace: str | None) -> str:
    if namespace is None:
        raise ConfigError(["name the graph's --namespace (`dynamo` unless you chose another)"])
    return checked_namespace(namespace)


def user_of(namespace: str, component: str) -> str:
    return f"{namespace}-{component}"


def password_variable(user: str) -> str:
    """The environment variable of nats-server that has the password of `user`."""
    return re.sub(r"\W", "_", user).upper() + "_PASSWORD"


def nats_account(namespace: str, permissions: Collection[Permissions]) -> str:
    """A part of nats-server's configuration.

    The graph has an account of its own: decode and prefill workers may make a stream, and in the
    same account a stream may record the messages of every graph, whatever its maker may read.
    """
    users = "".join(_nats_user(namespace, one) for one in permissions)
    return (
        "  # nats-server reads the passwords from the variables that are named here. For an NKey\n"
        "  # write `nkey: U...` in place of user and password; for a certificate `user` alone.\n"
        f'  "{namespace}": {{ jetstream: enabled, users: [\n{users}  ] }}\n'
    )


def _nats_user(namespace: str, permissions: Permissions) -> str:
    user = user_of(namespace, permissions.component)
    inbox = inbox_of(user)
    return (
        f"    # NATS URL: nats://HOST:4222?login=FILE&inbox={inbox}\n"
        f'    {{ user: "{user}", password: ${password_variable(user)}, permissions: {{\n'
        f"        publish: {_rule(permissions.publish)}\n"
        f"        subscribe: {_rule((*permissions.subscribe, f'{inbox}.>'))}\n"
        "        allow_responses: true\n"
        "    } }\n"
    )


def _rule(subjects: Sequence[str]) -> str:
    rule = {"allow": subjects} if subjects else {"deny": [">"]}
    return json.dumps(rule, separators=(",\n          ", ": "))


def etcd_commands(namespace: str, permissions: Collection[Permissions]) -> str:
    """Lines for a shell in which etcdctl reaches etcd as its administrator."""
    lines = [
        "# etcdctl asks for each user's password. Afterwards, if etcd has no users yet:",
        "# etcdctl user add root; etcdctl user grant-role root root; etcdctl auth enable",
        *(" ".join(["etcdctl", *step]) for step in _etcd_steps(namespace, permissions)),
    ]
    return "\n".join(lines) + "\n"


def _etcd_steps(namespace: str, permissions: Collection[Permissions]) -> list[list[str]]:
    """The arguments of etcdctl, a list for each call. It asks for the passwords."""
    steps: list[list[str]] = []
    for one in permissions:
        user = user_of(namespace, one.component)
        steps.append(["role", "add", user])
        for kind, prefixes in (("read", one.read), ("readwrite", one.write)):
            steps += [
                ["role", "grant-permission", "--prefix", user, kind, prefix] for prefix in prefixes
            ]
        steps += [["user", "add", user], ["user", "grant-role", user, user]]
    return steps


async def make_users(
    etcd_url: str, namespace: str, permissions: Collection[Permissions], logins: Path
) -> None:
    """Makes a user for each component, and `root`, and turns authentication on.

    May be repeated, also when an earlier call ended halfway: what exists stays, and each user gets
    the password of its file; with authentication on, `root` has that of its file already.
    logins: a folder with a file USER:PASSWORD for each user, named as the user.

    Raises ConfigError for a file or URL that cannot be used, StartupError when etcd refuses.
    """
    users = [_ROOT, *(user_of(namespace, each.component) for each in permissions)]
    passwords = {user: _password(logins / user, user) for user in users}
    as_root = {"user": _ROOT, "password": passwords[_ROOT]}

    async def call(*words: str, user: str = "") -> None:
        """user: whose password is the input."""
        typed = f"{passwords[user]}\n" if user else ""
        await etcdctl(etcd_url, *words, timeout_s=_ANSWER_S, typed=typed, **as_root)

    first = [["user", "add", _ROOT], ["user", "grant-role", _ROOT, _ROOT]]
    try:
        for step in [*first, *_etcd_steps(namespace, permissions), ["auth", "enable"]]:
            user = step[2] if step[:2] == ["user", "add"] else ""
            try:
                await call(*step, user=user)
            except StartupError as exc:
                if "already exists" not in str(exc):
                    raise
                if user:
                    await call("user", "passwd", user, user=user)
    except StartupError as exc:
        # etcdctl says no more when certificates or TLS are missing.
        silent = "deadline exceeded" in str(exc)
        hint = "; does it run, and does it want https:// and --certificates?" if silent else ""
        where = redact(etcd_url)
        raise StartupError(f"cannot make the users of etcd at {where}: {exc}{hint}") from exc


def _password(path: Path, user: str) -> str:
    """Raises ConfigError."""
    try:
        name, password = read_login(path)
    except ConfigError as exc:
        raise ConfigError([f"--make: {exc}"]) from exc
    if name != user or not password:
        raise ConfigError([f"--make: {path} is not the login of {user}: write {user}:PASSWORD"])
    if any(character.isspace() for character in password):
        raise ConfigError([f"--make: {path}: etcdctl reads a password to its first blank only"])
    return password
