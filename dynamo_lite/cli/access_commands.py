"""`dynamo-lite access`: who may use NATS and etcd, and with which credentials."""

from pathlib import Path
from typing import Annotated

import typer

from dynamo_lite.cli.arguments import DEFAULT_STATE_DIR, EtcdUrl, Namespace, NatsUrl, StateDir
from dynamo_lite.protocol.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    help="""Users of NATS and etcd: those for your own servers, and the credentials of a graph.

    \b
    dynamo-lite access nats --namespace dynamo > users.conf
    dynamo-lite access etcd --namespace dynamo --component PrefillWorker
    eval "$(dynamo-lite access etcd --env)"; etcdctl get --prefix dynamo
    eval "$(dynamo-lite access nats --env)"; nats sub 'dynamo_health.>'
    """,
)

_Env = Annotated[
    bool,
    typer.Option(
        "--env",
        help="Print instead, as variables for a shell, the address of the server that the graph"
        " here uses and the credentials. The output may have passwords.",
    ),
]
_Components = Annotated[
    list[str] | None,
    typer.Option("--component", help="Only the user of this one; may be repeated."),
]


@app.command("etcd")
def etcd(
    component: _Components = None,
    namespace: Namespace = None,
    env: _Env = False,
    make: Annotated[
        Path | None,
        typer.Option(
            help="Make the users at --etcd-url and turn authentication on, with the passwords of"
            " this folder: a file USER:PASSWORD named as each user, and one named `root`. The"
            " command may be run again.",
        ),
    ] = None,
    etcd_url: EtcdUrl = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Print the commands of `etcdctl` that make a user with the least rights for each component.

    A user may read and change only the keys that its component needs. `Operator` is for the
    commands of `dynamo-lite`. With --make the users are made at once, with `etcdctl`.
    """
    from dynamo_lite.cli.access_environment import as_shell, etcd_environment
    from dynamo_lite.cli.access_text import chosen, etcd_commands
    from dynamo_lite.cli.etcd_users import make_users
    from dynamo_lite.cli.listing import find_place

    if make is not None:
        if env or etcd_url is None:
            raise ConfigError(["--make needs --etcd-url, and goes without --env"])
        name = _checked(namespace)
        permissions = chosen(name, component or ())
        make_users(etcd_url, name, permissions, make)
        print(f"{len(permissions)} users of namespace {name}; authentication is on")
    elif env:
        _check_alone(component, namespace)
        print(as_shell(etcd_environment(find_place(state_dir, etcd_url, None).etcd_url)))
    else:
        name = _checked(namespace)
        print(etcd_commands(name, chosen(name, component or ())), end="")


@app.command("nats")
def nats(
    component: _Components = None,
    namespace: Namespace = None,
    env: _Env = False,
    nats_url: NatsUrl = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Print a part of nats-server's configuration: a user with the least rights per component.

    A user may publish and subscribe only to the subjects that its component needs, and to an
    inbox of its own, which `?inbox=` in the component's NATS URL names. `Operator` is for the
    commands of `dynamo-lite`.
    """
    from dynamo_lite.cli.access_environment import as_shell, nats_environment
    from dynamo_lite.cli.access_text import chosen, nats_configuration
    from dynamo_lite.cli.listing import find_broker

    if env:
        _check_alone(component, namespace)
        print(as_shell(nats_environment(find_broker(state_dir, nats_url, None).nats_url)))
    else:
        name = _checked(namespace)
        print(nats_configuration(name, chosen(name, component or ())), end="")


def _check_alone(component: list[str] | None, namespace: str | None) -> None:
    if component or namespace:
        raise ConfigError(["--env prints the credentials as they are, without other options"])


def _checked(namespace: str | None) -> str:
    from dynamo_lite.protocol import names

    if namespace is None:
        raise ConfigError(["name the graph's --namespace (`dynamo` unless you chose another)"])
    if not names.is_namespace(namespace):
        raise ConfigError([f"--namespace {namespace}: not a namespace"])
    return namespace
