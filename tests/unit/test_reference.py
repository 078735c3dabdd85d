"""The reference tables name every option with the default that the code has."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.disagg.decision.rule import DecisionReason
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.planner.config import KubernetesOptions, PlannerConfig
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.serve.config import GraphOptions, ServiceArgs
from dynamo_lite.serve.services.config import (
    FrontendConfig,
    PrefillWorkerConfig,
    QueueOptions,
    VllmWorkerConfig,
)

REFERENCE = Path("docs/configuration.md")
#: What the text before a table begins with.
TABLES = {
    "## `Graph`": GraphOptions,
    "## `ServiceArgs`": ServiceArgs,
    "## `Planner`": PlannerConfig,
    "## `Frontend`": FrontendConfig,
    "`kv-router`, as in": KvRoutingOptions,
    "## `VllmWorker`": VllmWorkerConfig,
    "## `PrefillWorker`": PrefillWorkerConfig,
    "## `queue`": QueueOptions,
    "## `Forwarder`": ForwarderConfig,
    "`engines`, as in": EngineOptions,
}


def documented(heading: str) -> dict[str, str]:
    """Option to what its row says of the default, in the first table after `heading`."""
    text = REFERENCE.read_text()
    lines = text[text.index("\n" + heading) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| key"))
    rows: dict[str, str] = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        _, keys, _type, default, *_ = (cell.strip() for cell in line.split("|"))
        named = re.findall(r"`([^`]+)`", keys)
        several = default.split(", ") if len(named) > 1 and default else [default] * len(named)
        rows |= zip(named, several, strict=True)
    return rows


def said(default: Any) -> str:
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


@pytest.mark.parametrize("heading", TABLES)
def test_the_table_has_every_option_with_its_default(heading: str):
    rows = documented(heading)
    fields = {f.name.replace("_", "-"): f for f in dataclasses.fields(TABLES[heading])}
    assert rows.keys() == fields.keys()
    for key, field in fields.items():
        nested = field.default_factory is not dataclasses.MISSING
        required = field.default is dataclasses.MISSING and not nested
        if required:
            assert rows[key] == "required"
        elif not nested and field.default is not None:
            assert rows[key].startswith(said(field.default)), (key, rows[key])


def test_the_table_of_decisions_has_every_reason():
    page = Path("docs/disaggregation.md").read_text()
    _, section = page.split("## The decision\n")
    rows = re.findall(r"\| (?:local|remote) \| `(\w+)` \|", section)
    assert sorted(rows) == sorted(reason.value for reason in DecisionReason)


def test_there_are_at_most_110_options():
    kinds = (*TABLES.values(), KubernetesOptions)
    assert sum(len(dataclasses.fields(kind)) for kind in kinds) <= 110


#: Put together from parts in the code.
COMPOSED = {"dynamo_lite_kv_index_blocks", "dynamo_lite_kv_index_evicted"}
#: Names of other things.
NO_METRICS = {"dynamo_lite_engine_config", "dynamo_lite_sim_process"}


def test_every_metric_is_explained():
    names = metrics_of_the_code()
    explained = Path("docs/observing.md").read_text()
    assert len(names) > 50
    assert [name for name in sorted(names) if name not in explained] == []


def test_every_metric_that_is_explained_exists():
    explained = set(re.findall(r"dynamo_lite_\w+", Path("docs/observing.md").read_text()))
    exist = {name + suffix for name in metrics_of_the_code() for suffix in ("", "_total", "_info")}
    assert explained - exist == COMPOSED


def metrics_of_the_code() -> set[str]:
    code = "\n".join(path.read_text() for path in Path("dynamo_lite").rglob("*.py"))
    return set(re.findall(r'"(dynamo_lite_\w+)"', code)) - NO_METRICS
