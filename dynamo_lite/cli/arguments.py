"""What the commands of `dynamo-lite` share: options, exit codes, and how one ends or waits.

Exit codes: 0: done or drained, 1: could not start or operate, 2: bad input, 130: killed by a second
signal, or interrupted.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from dynamo_lite.protocol.errors import ConfigError, DynamoLiteError, StartupError
from dynamo_lite.runtime.address import has_credentials, redact
from dynamo_lite.runtime.process.logs import LogFormat
from dynamo_lite.serve.child_environment import VARIABLES

#: Also where the answer to a command's question is no.
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
#: A worker has left, and its grace was over before its work.
EXIT_CUT_OFF = 3
EXIT_INTERRUPTED = 130

#: Between two looks at what was asked for: nothing here tells of a change.
_POLL_S = 0.2

StateDir = Annotated[
    Path, typer.Option(help="Directory for logs, run.json and data of embedded servers.")
]
Namespace = Annotated[
    str | None, typer.Option(help="Prefix of all etcd keys and NATS subjects of the graph.")
]


def _without_password(
    context: typer.Context, parameter: typer.CallbackParam, url: str | None
) -> str | None:
    """Raises ConfigError for a URL with credentials, unless it is the variable's value."""
    source = context.get_parameter_source(parameter.name or "")
    if url and has_credentials(url) and source is not None and source.name == "COMMANDLINE":
        option = (parameter.name or "").replace("_", "-")
        raise ConfigError(
            [
                f"--{option} {redact(url)}: it has credentials before the @, which all users of"
                " this machine can read in the list of processes; put a password into a file that"
                " only you can read and write ?login=FILE behind the host, or set the variable"
                f" {VARIABLES[option]} of the command `dynamo-lite`"
            ]
        )
    return url


EtcdUrl = Annotated[
    str | None,
    typer.Option(
        envvar=VARIABLES["etcd-url"],
        callback=_without_password,
        help="etcd server: http(s)://HOST:PORT[,HOST:PORT...][?ca=&cert=&key=&login=]. The"
        " variable may have USER:PASSWORD@ before the first host.",
    ),
]
NatsUrl = Annotated[
    str | None,
    typer.Option(
        envvar=VARIABLES["nats-url"],
        callback=_without_password,
        help="NATS server: nats|tls://HOST:PORT[,HOST:PORT...]"
        "[?ca=&cert=&key=&login=&creds=&nkey=&inbox=]. The variable may have USER:PASSWORD@ before"
        " the first host.",
    ),
]
CertificatesDir = Annotated[
    Path | None,
    typer.Option(
        "--certificates",
        envvar="DYNAMO_LITE_CERTIFICATES",
        help="The graph's certificates: a folder with ca.pem, Operator.pem and Operator-key.pem."
        " Default: that of the graph that runs on --state-dir.",
    ),
]
Targets = Annotated[
    list[str], typer.Argument(metavar="COMPONENT=N...", help="For example VllmWorker=3.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[bool, typer.Option(help="Log at level DEBUG.")]
LogLines = Annotated[
    LogFormat, typer.Option(help="Format of log lines: text, or one JSON object per line.")
]

DEFAULT_STATE_DIR = Path(".dynamo-lite")
#: By the names of their parameters.
_SHARED = {
    "state_dir": StateDir,
    "namespace": Namespace,
    "etcd_url": EtcdUrl,
    "verbose": Verbose,
    "log_format": LogLines,
}


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the parameters of these names, in a command of another room, their help and checks."""
    types = command.__annotations__
    types.update({name: _SHARED[name] for name in _SHARED if name in types})
    return command


@contextlib.contextmanager
def interruptible(says: str) -> Iterator[None]:
    """After Ctrl-C in the body `says` is printed, and the command ends with EXIT_INTERRUPTED."""
    try:
        yield
    except KeyboardInterrupt:
        print(says, file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def run(app: typer.Typer) -> None:
    """Prints expected errors as lines and maps them to exit codes."""
    try:
        app()
    except ConfigError as exc:
        for mistake in exc.mistakes:
            print(f"error: {mistake}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except DynamoLiteError as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


async def follow(look: Callable[[], Awaitable[tuple[str, bool]]], timeout_s: float) -> None:
    """Looks until it is done, and prints each change with the seconds since the start.

    look: says how it stands, and whether it is done. Raises StartupError after `timeout_s`.
    """
    began, told = time.monotonic(), ""
    while True:
        text, done = await look()
        passed_s = time.monotonic() - began
        if text != told:
            print(f"{passed_s:6.1f}s  {text}", flush=True)
            told = text
        if done:
            return
        if passed_s > timeout_s:
            raise StartupError(f"timeout after {timeout_s:g} s, and it goes on: {text}")
        await asyncio.sleep(_POLL_S)
