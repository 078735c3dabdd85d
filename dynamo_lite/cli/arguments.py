"""Options that several commands of `dynamo-lite` share."""

from pathlib import Path
from typing import Annotated

import typer

StateDir = Annotated[
    Path, typer.Option(help="Directory for logs, run.json and data of embedded servers.")
]
Namespace = Annotated[
    str | None, typer.Option(help="Prefix of all etcd keys and NATS subjects of the graph.")
]
EtcdUrl = Annotated[
    str | None,
    typer.Option(
        help="etcd server: http(s)://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][?ca=&cert=&key=]"
    ),
]
NatsUrl = Annotated[
    str | None,
    typer.Option(
        help="NATS server: nats|tls://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][?ca=&cert=&key=]"
    ),
]

DEFAULT_STATE_DIR = Path(".dynamo-lite")
