"""A budget below the devices of the workers that the planner's own graph starts is refused."""

from pathlib import Path

import pytest

from dynamo_lite.serve.config import resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.serve.startup_checks import check_planner_budget

FILE = Path(__file__).resolve().parents[2] / "configs" / "disagg_planner.yaml"
LINE = next(n for n, line in enumerate(FILE.read_text().split("\n"), 1) if "budget-devices" in line)
TWO_EACH = [f"--{name}.ServiceArgs.devices=2" for name in ("VllmWorker", "PrefillWorker")]
MANY = "--PrefillWorker.ServiceArgs.workers=4"


def mistakes(*overrides: str, only: str | None = None) -> list[str]:
    """Of the packaged configuration, whose budget is 4."""
    document = read_document(FILE, ["--Graph.devices=32", *overrides])
    config = resolve(load_graph("graphs.disagg_planner:Frontend"), document, only=only)
    assert document.mistakes == []
    check_planner_budget(config, document, only=only)
    return document.mistakes


@pytest.mark.parametrize("overrides", [[], TWO_EACH, ["--PrefillWorker.ServiceArgs.workers=3"]])
def test_a_budget_for_the_graph_s_own_workers_is_enough(overrides: list[str]):
    assert mistakes(*overrides) == []


def test_a_budget_below_the_workers_that_start_is_refused():
    assert mistakes(MANY, "--VllmWorker.ServiceArgs.devices=2") == [
        f"{FILE}:{LINE}: Planner.budget-devices: 4, but the workers that the graph starts need 6"
        " devices: PrefillWorker 4 * 1, VllmWorker 1 * 2 (a worker without a device counts as"
        " one); raise the budget, or start fewer workers (ServiceArgs.workers)"
    ]
    [flag] = mistakes(*TWO_EACH, "--Planner.budget-devices=3", "--Planner.decode-min=1")[1:]
    assert flag.startswith("--Planner.budget-devices: 3, but the workers")


def test_a_budget_below_the_minima_is_refused_by_their_devices():
    assert mistakes(*TWO_EACH, "--Planner.decode-min=2") == [
        f"{FILE}:{LINE}: Planner.budget-devices: prefill-min (1 * 2) and decode-min (2 * 2) need 6"
        " devices together, more than budget-devices, 4"
    ]


def test_only_what_starts_here_is_compared():
    assert mistakes(MANY, only="PrefillWorker") == []
    assert mistakes(MANY, only="Planner") == []
    assert len(mistakes(*TWO_EACH, "--Planner.decode-min=2", only="Planner")) == 1
    assert mistakes(MANY, "--Planner.ServiceArgs.workers=0") == []
    pods = "--Planner.kubernetes.decode=deployments/decode"
    assert mistakes(MANY, "--Planner.connector=kubernetes", pods) == []
