"""The checks before any process starts."""

from pathlib import Path

import pytest
from dynamo_lite.serve.secret_file import check_exposure

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.serve.config import resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.serve.startup_checks import (
    check_planner_budget,
    check_stored_responses,
    readable_by_others,
)

FILE = Path(__file__).resolve().parents[2] / "configs" / "disagg_planner.yaml"
LINE = next(n for n, line in enumerate(FILE.read_text().split("\n"), 1) if "budget-devices" in line)
TWO_EACH = [f"--{name}.ServiceArgs.devices=2" for name in ("VllmWorker", "PrefillWorker")]
MANY = "--PrefillWorker.ServiceArgs.workers=4"


@pytest.mark.parametrize(
    ("nats", "etcd", "named"),
    [
        (None, None, []),
        ("nats://127.0.0.1:4222,[::1]:4222", "http://localhost:2379", []),
        ("tls://10.0.0.1:4222", "https://etcd:2379", []),
        ("nats://10.0.0.1:4222", "http://etcd:2379", ["NATS", "etcd"]),
        ("nats://127.0.0.1:4222,10.0.0.1:4222", None, ["NATS"]),
    ],
)
def test_servers_of_other_hosts_without_tls_are_warned_of(
    nats: str | None, etcd: str | None, named: list[str]
):
    warnings = readable_by_others(nats, etcd)
    assert [warning.split()[1] for warning in warnings] == named
    assert all("without TLS" in warning for warning in warnings)
    assert "hidden" not in readable_by_others("nats://me:hidden@nats:4222", None)[0]


@pytest.mark.parametrize(
    ("bind_host", "nats", "named"),
    [
        ("127.0.0.1", None, []),
        ("127.0.0.1", "nats://127.0.0.1:4222,localhost:4223,[::1]", []),
        ("127.0.0.1", "nats://10.0.0.1:4222", ["--nats-url"]),
        # Also over TLS: it says who the server is, not who may use it.
        ("::1", "tls://127.0.0.1,nats:4222", ["--nats-url"]),
        ("0.0.0.0", None, ["Graph.bind-host"]),
        ("node-1", None, ["Graph.bind-host"]),
        ("::", None, ["Graph.bind-host"]),
        ("10.0.0.9", "nats://me:hidden@nats", ["Graph.bind-host", "--nats-url"]),
    ],
)
def test_what_others_reach_needs_a_secret(bind_host: str, nats: str | None, named: list[str]):
    check_exposure(bind_host, nats, Path("secret"))
    if not named:
        check_exposure(bind_host, nats, None)
        return
    with pytest.raises(ConfigError) as refused:
        check_exposure(bind_host, nats, None)
    assert [mistake.partition(":")[0] for mistake in refused.value.mistakes] == named
    assert all("--secret-file FILE" in mistake for mistake in refused.value.mistakes)
    assert "hidden" not in str(refused.value)


def over_budget(*overrides: str, only: str | None = None) -> list[str]:
    """Of the packaged configuration, whose budget is 4."""
    document = read_document(FILE, ["--Graph.devices=32", *overrides])
    config = resolve(load_graph("graphs.disagg_planner:Frontend"), document, only=only)
    assert document.mistakes == []
    check_planner_budget(config, document, only=only)
    return document.mistakes


def test_a_budget_below_the_workers_that_start_or_the_minima_is_refused():
    assert over_budget(MANY, "--VllmWorker.ServiceArgs.devices=2") == [
        f"{FILE}:{LINE}: Planner.budget-devices: 4, but the workers that the graph starts need 6"
        " devices: PrefillWorker 4 * 1, VllmWorker 1 * 2 (a worker without a device counts as"
        " one); raise the budget, or start fewer workers (ServiceArgs.workers)"
    ]
    [flag] = over_budget(*TWO_EACH, "--Planner.budget-devices=3", "--Planner.decode-min=1")[1:]
    assert flag.startswith("--Planner.budget-devices: 3, but the workers")
    assert over_budget(*TWO_EACH, "--Planner.decode-min=2") == [
        f"{FILE}:{LINE}: Planner.budget-devices: prefill-min (1 * 2) and decode-min (2 * 2) need 6"
        " devices together, more than budget-devices, 4"
    ]


def test_a_budget_is_enough_for_the_minima_and_for_the_workers_that_start_here():
    for enough in ([], TWO_EACH, ["--PrefillWorker.ServiceArgs.workers=3"]):
        assert over_budget(*enough) == []
    assert over_budget(MANY, only="PrefillWorker") == over_budget(MANY, only="Planner") == []
    assert len(over_budget(*TWO_EACH, "--Planner.decode-min=2", only="Planner")) == 1
    assert over_budget(MANY, "--Planner.ServiceArgs.workers=0") == []
    assert over_budget(MANY, "--Planner.kubernetes.decode=deployments/decode") == []


@pytest.mark.parametrize(("stores", "processes"), [("1", 2), ("1", 1), ("0", 2)])
def test_responses_are_stored_by_one_frontend_only(stores: str, processes: int):
    """Another one would answer 404 for them."""
    several = f"--Frontend.ServiceArgs.workers={processes}"
    store = f"--Frontend.ServiceArgs.env.VLLM_ENABLE_RESPONSES_API_STORE={stores}"
    document = read_document(FILE, [several, store])
    config = resolve(load_graph("graphs.disagg_planner:Frontend"), document)
    check_stored_responses(config, document, only="VllmWorker")
    assert document.mistakes == []
    check_stored_responses(config, document, only=None)
    named = [mistake.partition(":")[0] for mistake in document.mistakes]
    assert named == ["--Frontend.ServiceArgs.workers"] * (stores == "1" and processes == 2)
