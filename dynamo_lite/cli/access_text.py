"""Users with the least rights, as nats-server's configuration and as commands of etcdctl."""

import re
from collections.abc import Iterable, Sequence

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.permissions import Permissions, all_permissions, inbox_of


def chosen(namespace: str, components: Iterable[str]) -> list[Permissions]:
    """The permissions of these components; of all if none is named. Raises ConfigError."""
    known = all_permissions(namespace)
    wanted = list(components)
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(
            [f"--component {name}: choose from {', '.join(known)}" for name in unknown]
        )
    return [known[name] for name in wanted or known]


def user_of(namespace: str, component: str) -> str:
    """The name of a component's user, of NATS and of etcd."""
    return f"{namespace}-{component}"


def password_variable(user: str) -> str:
    """The environment variable of nats-server that has the password of `user`."""
    return re.sub(r"\W", "_", user).upper() + "_PASSWORD"


def nats_configuration(namespace: str, permissions: Sequence[Permissions]) -> str:
    """A file to be included into nats-server's configuration.

    The graph has an account of its own: decode and prefill workers may make a stream, and in the
    same account a stream may record the messages of every graph, whatever its maker may read.
    """
    return f"accounts {{\n{nats_account(namespace, permissions)}}}\n"


def nats_account(namespace: str, permissions: Sequence[Permissions]) -> str:
    """The graph's entry in `accounts`."""
    users = "".join(_nats_user(namespace, one) for one in permissions)
    return (
        "  # nats-server reads the passwords from the variables that are named here. For an NKey\n"
        "  # write `nkey: U...` in place of user and password; for a certificate `user` alone.\n"
        f'  "{namespace}": {{ jetstream: enabled, users: [\n{users}  ] }}\n'
    )


def _nats_user(namespace: str, permissions: Permissions) -> str:
    user = user_of(namespace, permissions.component)
    inbox = inbox_of(user)
    publish, subscribe = permissions.publish, (*permissions.subscribe, f"{inbox}.>")
    return (
        f"    # NATS URL: nats://HOST:4222?login=FILE&inbox={inbox}\n"
        f'    {{ user: "{user}", password: ${password_variable(user)}, permissions: {{\n'
        f"        publish: {_rule(publish)}\n"
        f"        subscribe: {_rule(subscribe)}\n"
        "        allow_responses: true\n"
        "    } }\n"
    )


def _rule(subjects: Sequence[str]) -> str:
    if not subjects:
        return '{ deny: [">"] }'
    lines = "".join(f'          "{subject}"\n' for subject in subjects)
    return f"{{ allow: [\n{lines}        ] }}"


def etcd_commands(namespace: str, permissions: Sequence[Permissions]) -> str:
    """Lines for a shell in which etcdctl reaches etcd as its administrator."""
    lines = [
        "# etcdctl asks for each user's password. Afterwards, if etcd has no users yet:",
        "# etcdctl user add root; etcdctl user grant-role root root; etcdctl auth enable",
        *(" ".join(["etcdctl", *step]) for step in etcd_steps(namespace, permissions)),
    ]
    return "\n".join(lines) + "\n"


def etcd_steps(namespace: str, permissions: Sequence[Permissions]) -> list[list[str]]:
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
