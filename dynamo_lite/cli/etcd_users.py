"""Makes the users of etcd, through etcdctl, with the passwords of login files."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo_lite.cli.access_environment import etcd_environment
from dynamo_lite.cli.access_text import etcd_steps, user_of
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.permissions import Permissions
from dynamo_lite.runtime.address import redact
from dynamo_lite.runtime.credentials import BadCredentials, read_login
from dynamo_lite.serve.child_environment import child_environment
from dynamo_lite.serve.embedded import program

_ROOT = "root"
#: Of etcdctl's own; a little later it is killed. Passwords are hashed slowly on purpose.
_ANSWER_S, _TIMEOUT_S = 30, 60.0


def make_users(
    etcd_url: str, namespace: str, permissions: Sequence[Permissions], logins: Path
) -> None:
    """Makes a user for each component, and `root`, and turns authentication on.

    May be repeated, also when an earlier call ended halfway: what exists stays, a password that
    differs from its file is changed. logins: a folder with a file USER:PASSWORD for each user,
    named as the user.

    Raises ConfigError for a file or URL that cannot be used, StartupError when etcd refuses.
    """
    users = [_ROOT, *(user_of(namespace, each.component) for each in permissions)]
    passwords = {user: _password(logins / user, user) for user in users}
    etcdctl = _EtcdCtl(etcd_url, passwords)
    first = [["user", "add", _ROOT], ["user", "grant-role", _ROOT, _ROOT]]
    for step in [*first, *etcd_steps(namespace, permissions), ["auth", "enable"]]:
        match step:
            case ["user", "add", user]:
                etcdctl.add(user)
            case _:
                etcdctl.run(step)


class _EtcdCtl:
    """etcdctl as `root`. While authentication is off, etcd ignores who asks."""

    def __init__(self, etcd_url: str, passwords: Mapping[str, str]):
        self._url, self._passwords = etcd_url, passwords
        self._environment = child_environment(etcd_environment(etcd_url))
        self._program = program("etcdctl")

    def add(self, user: str) -> None:
        """Makes the user, or gives it the password of its file."""
        added = self._call(["user", "add", user, "--interactive=false"], typed=user)
        if "already exists" not in added.stderr:
            self._check(added)
        elif not self._has_password(user):
            self._check(self._call(["user", "passwd", user, "--interactive=false"], typed=user))

    def _has_password(self, user: str) -> bool:
        """While authentication is off, etcd takes any password for right: False."""
        status = self._call(["auth", "status"])
        if "Status: false" in status.stdout:
            return False
        return self._call(["user", "get", user], as_user=user).returncode == 0

    def run(self, words: Sequence[str]) -> None:
        done = self._call(words)
        if "already exists" not in done.stderr:
            self._check(done)

    def _call(
        self, words: Sequence[str], *, as_user: str = _ROOT, typed: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """typed: the user whose password is the input. No argument has a password."""
        login = {"ETCDCTL_USER": as_user, "ETCDCTL_PASSWORD": self._passwords[as_user]}
        try:
            return subprocess.run(
                [self._program, f"--command-timeout={_ANSWER_S}s", "--dial-timeout=10s", *words],
                env={**self._environment, **login},
                input=f"{self._passwords[typed]}\n" if typed else "",
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as exc:
            raise StartupError(f"{self._name}: no answer within {_TIMEOUT_S:g} s") from exc

    def _check(self, done: subprocess.CompletedProcess[str]) -> None:
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            command = " ".join(done.args[3:5])
            raise StartupError(f"{self._name}: `etcdctl {command}` failed: {redact(reason)}")

    @property
    def _name(self) -> str:
        return f"cannot make the users of etcd at {redact(self._url)}"


def _password(path: Path, user: str) -> str:
    """Raises ConfigError."""
    try:
        name, password = read_login(path)
    except BadCredentials as exc:
        raise ConfigError([f"--make: {exc}"]) from exc
    if name != user or not password:
        raise ConfigError([f"--make: {path} is not the login of {user}: write {user}:PASSWORD"])
    if any(character.isspace() for character in password):
        raise ConfigError([f"--make: {path}: etcdctl reads a password to its first blank only"])
    return password
