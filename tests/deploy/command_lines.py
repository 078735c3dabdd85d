"""Checks a `dynamo-lite` command line with the shipped parser, and its file as `serve` does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from dynamo_lite.cli.cli import app
from dynamo_lite.runtime.address import is_loopback
from dynamo_lite.serve.config import GraphConfig, ServiceConfig, resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.serve.supervisor import _CLOSE_MARGIN_S, _DRAIN_MARGIN_S

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


@dataclass(frozen=True)
class Served:
    """A checked `dynamo-lite serve`."""

    #: The parsed options.
    options: Mapping[str, Any]
    config: GraphConfig

    @property
    def service(self) -> ServiceConfig:
        """The one that is started alone."""
        found = self.config.get(self.options["service_name"])
        assert found is not None
        return found

    @property
    def longest_stop_s(self) -> float:
        """From the first SIGTERM until the supervisor has ended, at most."""
        tiers = [c for c in self.config.here if c.workers]
        return len(tiers) * (self.config.shared.grace_s + _DRAIN_MARGIN_S) + _CLOSE_MARGIN_S


def served(arguments: Sequence[str], files: Mapping[str, Path]) -> Served:
    """Parses `serve ...`. files: the file at each path that the command line may name.

    Raises click's usage errors and ConfigError.
    """
    group = get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    with group.make_context("dynamo-lite", list(arguments)) as context:
        name, command, rest = group.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert name == "serve" and command is not None
        with command.make_context(name, rest, parent=context) as sub:
            options, overrides = dict(sub.params), list(sub.args)
    document = read_document(files[str(options["file"])], overrides)
    config = resolve(load_graph(options["graph"]), document, only=options["service_name"])
    document.raise_mistakes()
    if options["service_name"] is not None:
        folder = config.shared.certificates
        assert is_loopback(config.shared.bind_host) or folder is not None
        for name in ("nats_url", "etcd_url"):
            assert (options[name] or "tls://").startswith(("tls://", "https://"))
    return Served(options, config)


def variables() -> set[str]:
    """The environment variables that `serve` reads."""
    group = get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    parameters = group.commands["serve"].params
    return {str(parameter.envvar) for parameter in parameters if parameter.envvar}
