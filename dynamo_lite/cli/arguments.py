"""Options that several commands of `dynamo-lite` have in common."""

from pathlib import Path
from typing import Annotated

import typer

StateDir = Annotated[Path, typer.Option(help="Logs, run.json, data of embedded servers.")]
Namespace = Annotated[str | None, typer.Option(help="Prefix of etcd keys and NATS subjects.")]
EtcdUrl = Annotated[
    str | None,
    typer.Option(help="http[s]://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][?ca=&cert=&key=]"),
]
NatsUrl = Annotated[
    str | None,
    typer.Option(help="nats|tls://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][?ca=&cert=&key=]"),
]

DEFAULT_STATE_DIR = Path(".dynamo-lite")
