"""Where the URLs of NATS and etcd may have a password."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from dynamo_lite.cli.cli import app
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.address import has_credentials, redact
from dynamo_lite.serve.child_environment import VARIABLES
from dynamo_lite.serve.document import read_document


def commands(command: Any, *name: str) -> Iterator[tuple[str, Any]]:
    """Every command of `dynamo-lite` by its words."""
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *name, word)
    if not hasattr(command, "commands"):
        yield " ".join(name), command


def options() -> list[tuple[str, Any, str]]:
    """Each option of each command that takes a server's URL."""
    return [
        (name, command, option)
        for name, command in commands(typer.main.get_command(app))
        for parameter in command.params
        for option in VARIABLES
        if f"--{option}" in parameter.opts
    ]


def test_the_commands_that_take_urls_are_found():
    found = {(name, option) for name, _, option in options()}
    assert {("serve", "nats-url"), ("join", "etcd-url"), ("planner status", "etcd-url")} <= found


@pytest.mark.parametrize(("name", "command", "option"), options(), ids=str)
def test_no_command_takes_a_password_as_an_argument(name: str, command: Any, option: str):
    scheme = "nats" if option == "nats-url" else "http"
    arguments = [f"--{option}={scheme}://me:s3cret@h:1"]
    with pytest.raises(ConfigError) as failure:
        command.make_context(name, arguments)
    (mistake,) = failure.value.mistakes
    assert mistake.startswith(f"--{option} {scheme}://h:1: it has credentials")
    assert "?login=FILE" in mistake and VARIABLES[option] in mistake
    assert "s3cret" not in mistake and "me:" not in mistake


def test_a_variable_may_have_a_password(monkeypatch: pytest.MonkeyPatch):
    url = "nats://me:s3cret@h:1"
    monkeypatch.setenv(VARIABLES["nats-url"], url)
    [command] = [c for name, c, option in options() if (name, option) == ("serve", "nats-url")]
    context = command.make_context("serve", ["graphs.agg:Frontend"])
    assert context.params["nats_url"] == url
    # An argument goes before the variable.
    with pytest.raises(ConfigError):
        command.make_context("serve", ["graphs.agg:Frontend", "--nats-url", "nats://s3cret@i"])


@pytest.mark.parametrize(
    "url", ["nats://h:1", "h:1", "tls://a,b?ca=/x%40y&login=/y", "http://[::1]:1", ""]
)
def test_other_urls_are_taken(url: str):
    assert not has_credentials(url)


@pytest.mark.parametrize(
    "url", ["nats://s3cret@h", "me:s3cret@h", "nats://h,nats://me:s3cret@i", "tls://@h?login=/x"]
)
def test_other_ways_to_write_credentials_are_refused(url: str):
    assert has_credentials(url)
    assert "s3cret" not in redact(url)


@pytest.mark.parametrize(
    "flags", [["--nat-url=nats://me:s3cret@h"], ["--nat-url", "nats://me:s3cret@h"]]
)
def test_an_unknown_option_is_named_without_its_value(flags: list[str]):
    mistakes = read_document(None, flags).mistakes
    assert mistakes[0].startswith("--nat-url: unknown option")
    assert "s3cret" not in "".join(mistakes)
