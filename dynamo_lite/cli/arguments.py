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
        envvar="DYNAMO_LITE_ETCD_URL",
        help="etcd server: http(s)://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]"
        "[?ca=&cert=&key=&login=]",
    ),
]
NatsUrl = Annotated[
    str | None,
    typer.Option(
        envvar="DYNAMO_LITE_NATS_URL",
        help="NATS server: nats|tls://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]"
        "[?ca=&cert=&key=&login=&creds=&nkey=&inbox=]",
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        help="The graph's secret: one or two lines of 64 hexadecimal digits, mode 600. The same on"
        " all hosts. Default: that of the graph that runs on --state-dir."
    ),
]

DEFAULT_STATE_DIR = Path(".dynamo-lite")
