"""YAML and overrides to a resolved configuration; every mistake at once."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from dynamo_lite.disagg.decision.rule import DecisionReason, decide
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.protocol.decisions import DecisionInputs, QueueSeen
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.runtime.address import host_port, is_loopback
from dynamo_lite.serve.child_environment import VARIABLES, child_environment
from dynamo_lite.serve.config import GraphConfig, ServiceConfig, describe, resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.serve.services.services import FRONTEND, ROUTER, VLLM_WORKER, Graph
from graphs import agg, agg_router, disagg, disagg_planner, disagg_router, forward

ROOT = Path(__file__).resolve().parents[2]

GOOD: dict[str, Any] = {
    "Common": {"model": "m", "queue": {"max-jobs": 9}},
    "Frontend": {"common-configs": ["model"], "port": 0},
    "VllmWorker": {"common-configs": ["model", "queue"], "max-num-seqs": 4},
    "PrefillWorker": {"common-configs": ["model", "queue"]},
}
#: Two devices for a decode worker, one for a prefill worker.
EACH = (
    *("--VllmWorker.ServiceArgs.devices=2", "--VllmWorker.tensor-parallel-size=2"),
    "--PrefillWorker.ServiceArgs.devices=1",
)


class Loader:
    """Resolves YAML text as the command line does, without asking vLLM."""

    def __init__(self, directory: Path):
        self.file = directory / "graph.yaml"

    def __call__(
        self,
        content: dict[str, Any] | str,
        *overrides: str,
        graph: Graph = disagg.Frontend,
        only: str | None = None,
    ) -> GraphConfig:
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        self.file.write_text(text)
        document = read_document(self.file, list(overrides))
        config = resolve(graph, document, only=only)
        document.raise_mistakes()
        return config

    def worker(
        self, *overrides: str, content: dict[str, Any] = GOOD, graph: Graph = disagg.Frontend
    ) -> ServiceConfig:
        found = self(content, *overrides, graph=graph).get("VllmWorker")
        assert found is not None
        return found

    def mistakes(self, *args: Any, **kwargs: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            self(*args, **kwargs)
        return [m.replace(str(self.file), "FILE") for m in caught.value.mistakes]


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


def test_the_kv_router_is_a_section_of_its_own(load: Loader):
    section = "--Frontend.kv-router"
    frontend = load(GOOD, "--Frontend.router=kv", f"{section}.kv-weight=3").get("Frontend")
    assert frontend is not None and frontend.options["router"] == "kv"
    assert frontend.options["kv_router"]["kv_weight"] == 3
    mistakes = load.mistakes(GOOD, f"{section}.kv-weight=-1", f"{section}.weight=1")
    assert ["Frontend.kv-router.kv-weight" in m for m in mistakes] == [True, False]
    assert "did you mean kv-weight?" in mistakes[1]


def test_own_options_are_filled_the_rest_goes_to_vllm_and_overrides_win(load: Loader):
    worker = load.worker()
    assert worker.flags == {"model": "m", "max-num-seqs": 4}
    queue = {"max_jobs": 9, "short_length": 2048}
    assert worker.options["queue"] == {**queue, "replicas": 1, "storage": "memory"}
    assert worker.options["max_local_prefill_length"] == 512
    assert worker.options["single_flight_min_length"] is None
    own = "--VllmWorker"
    nested = ("--Common.queue.max-jobs=5", f"{own}.hf-overrides={{a: 1}}")
    worker = load.worker(f"{own}.ServiceArgs.workers=2", *nested)
    assert worker.workers == 2 and worker.options["queue"]["max_jobs"] == 5
    assert worker.flags["hf-overrides"] == {"a": 1}
    worker = load.worker(f"{own}.ServiceArgs.env.OMP_NUM_THREADS=2")
    assert worker.env == {"OMP_NUM_THREADS": "2"}


def test_a_key_of_the_service_wins_over_the_common_one(load: Loader):
    config = load(
        {"Common": {"model": "m", "dtype": "half"},
         "Frontend": {"common-configs": ["model", "dtype"], "dtype": "float"},
         "VllmWorker": {"common-configs": ["model", "dtype"]}},
        graph=agg.Frontend,
    )  # fmt: skip
    assert [c.flags.get("dtype") for c in config.services] == ["float", "half"]


def test_devices_are_a_list_or_a_number(load: Loader):
    assert load(GOOD, *EACH, "--Graph.devices=[0, 1, GPU-c]").shared.devices == (0, 1, "GPU-c")
    assert load(GOOD, *EACH, "--Graph.devices=3").shared.devices == 3
    [found] = load.mistakes(GOOD, *EACH, "--Graph.devices=3", "--Graph.device=3")
    assert found.startswith("--Graph.device: unknown key; did you mean devices?")
    own = "--VllmWorker.ServiceArgs.env.CUDA_VISIBLE_DEVICES=0"
    [found] = load.mistakes(GOOD, *EACH, "--Graph.devices=3", own)
    assert "Graph.devices sets CUDA_VISIBLE_DEVICES" in found


@pytest.mark.parametrize(
    ("only", "devices", "order"),
    [
        (None, "[4, 5, GPU-c]", ("4", "5", "GPU-c")),
        ("VllmWorker", "[4, 5, GPU-c]", ("4", "5")),
        ("PrefillWorker", "[4, 5, GPU-c]", ("GPU-c",)),
        ("VllmWorker", "5", ("0", "1", "3", "4")),
        ("PrefillWorker", "4", ("2", "3")),
        ("PrefillWorker", "2", ("0", "1")),
        ("PrefillWorker", "[4]", ("4",)),
    ],
)
def test_services_that_start_alone_on_one_host_get_different_devices(
    load: Loader, only: str | None, devices: str, order: tuple[str, ...]
):
    assert load(GOOD, *EACH, f"--Graph.devices={devices}", only=only).devices == order


def test_every_mistake_at_once_with_line_path_and_accepted_keys(load: Loader):
    text = """\
Common: {model: m, spare: 1}
Frontent: {}
Frontend:
  common-configs: [model, modle]
  port: "8000"
VllmWorker:
  common-configs: [model]
  max-local-prefill-length: -5
  queue: {max-jobz: 5}
  ServiceArgs: {workers: two}
  dtype: half
  dtype: float
PrefillWorker:
  model: other
"""
    found = load.mistakes(text, "--foo", "--Graph.namespace=Foo")
    expected = [
        "FILE:12: VllmWorker.dtype: duplicate key",
        "--foo: unknown option",
        "FILE:2: Frontent: unknown section; did you mean Frontend? accepted: Graph, Common, ",
        "--Graph.namespace: a namespace has at most 63 lower-case letters",
        "FILE:4: Frontend.common-configs: modle: unknown key; did you mean model?",
        'FILE:5: Frontend.port: expected `int`, got "8000"',
        "FILE:8: VllmWorker.max-local-prefill-length: expected `int` >= 0",
        "FILE:9: VllmWorker.queue.max-jobz: unknown key; did you mean max-jobs? accepted: max-jo",
        "FILE:10: VllmWorker.ServiceArgs.workers: expected `int`",
        "FILE:1: Common.spare: no service lists this key",
        "must have the same value",
    ]
    for start in expected:
        assert any(start in mistake for mistake in found), (start, found)
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    "text", ["2026-11-25: 1", "hf: {rope: [{2026-11-25: 1}]}", "hf: {!!binary YQ==: 1}"]
)
def test_keys_that_json_cannot_have_are_refused(load: Loader, text: str):
    [mistake] = load.mistakes(f"Frontend: {{model: m}}\nVllmWorker:\n  {text}")
    assert mistake.startswith("FILE: not valid YAML: keys must be str, int, float, bool or None")


@pytest.mark.parametrize(
    "text",
    ["a: &a [*a]", "a: &a [[1, [*a]]]", "a: &a {b: *a}", "a: &a [{b: [*a]}]"],
)
def test_values_that_contain_themselves_are_refused(load: Loader, text: str):
    """Values may be used twice, also inside each other, as long as this has an end."""
    [mistake] = load.mistakes(f"Frontend: {{model: m}}\nVllmWorker:\n  {text}")
    assert mistake.startswith("FILE: not valid YAML: ")
    text = "VllmWorker:\n  a: &a [1]\n  b: &b {c: *a, d: [*a, *a]}\n  e: [*b, {f: *b}]"
    [*mistakes] = load.mistakes(f"Frontend: {{model: m}}\n{text}")
    assert not any("YAML" in mistake for mistake in mistakes)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "--VllmWorker.hf-overrides={2026-11-25: 1}",
            "not valid YAML: keys must be str, int, float, bool or None, not date",
        ),
        ("--Processor.model=m", "--Processor.model: Processor: unknown section; "),
        ("--VllmWorker.ServiceArgs.env.X=[1, 2]", "ServiceArgs.env: expected "),
        ("--VllmWorker.remote-prefill=1", "expected `bool`, got 1"),
        (
            "--VllmWorker.queue={max-jobs: 8}",
            "VllmWorker.queue: must have the same value: VllmWorker has {'max-jobs': 8, ",
        ),
        ("--VllmWorker.queue.max-jobs=[", "not valid YAML"),
        ("--VllmWorker.hf-overrides=&a [*a]", "not valid YAML: Circular reference detected"),
        ("--Planner.tick-s=1", "--Planner.tick-s: Planner: this graph has no Planner"),
        ("--Frontend=3", "unknown option"),
        ("--Frontend.router=component", "--Frontend.router: this graph has no Router: choose kv"),
        ("--Frontend.common-configs=model", "expected a list"),
        ("--Graph.devices=-1", "expected `int` >= 0, got -1"),
        ("--Graph.devices=all", "expected `int | array`"),
        ("--Graph.lease-ttl-s=1", "expected `float` >= 2.0, got 1"),
        ("--Graph.trace-ratio=1.5", "expected `float` <= 1.0, got 1.5"),
        (
            "--Graph.otlp-endpoint=collector:4317",
            "expected http://HOST:PORT or https://HOST:PORT, got",
        ),
        ("--VllmWorker.ServiceArgs.status-port=70000", "expected `int` <= 65535"),
        ("--VllmWorker.model=null", "expected the path or the name"),
        ("--Frontend.api-key=k", "or set the variable VLLM_API_KEY"),
        ("--Frontend.api_key=[k, l]", "or set the variable VLLM_API_KEY"),
        ("--VllmWorker.ServiceArgs.env.HF_TOKEN=k", "or set the variable HF_TOKEN"),
        ("--VllmWorker.ServiceArgs.env={A: 1, HF_TOKEN: k}", "or set the variable HF_TOKEN"),
        ("--VllmWorker.hf-token=k", "or set the variable HF_TOKEN"),
    ],
)
def test_one_mistake(load: Loader, override: str, message: str):
    assert any(message in mistake for mistake in load.mistakes(GOOD, override))


@pytest.mark.parametrize("text", ["- 1", "a: [", "\x00", "a: &x *x"])
def test_a_file_that_is_no_configuration(load: Loader, text: str):
    assert load.mistakes(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_document(load.file.parent, [])


def test_a_graph_is_complete_and_without_doubles():
    graph = FRONTEND.link(ROUTER)
    assert graph.missing() == ["VllmWorker"]
    with pytest.raises(ValueError, match="twice"):
        graph.link(VLLM_WORKER).link(VLLM_WORKER)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("graphs.disagg", "expected MODULE:NAME"),
        ("graphs.disag:Frontend", "no module graphs.disag in .*; `dynamo-lite examples` lists"),
        ("nowhere.at.all:Frontend", "no module"),
        ("graphs.disagg:Nothing", "graphs there: Frontend"),
        ("dynamo_lite.serve.services.services:FRONTEND", "has no graph"),
    ],
)
def test_unknown_graphs(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_graph(name)


#: File, graph, and the router that it chooses.
SHIPPED = [
    ("agg", agg.Frontend, "round-robin"),
    ("agg", agg_router.Frontend, "component"),
    ("disagg", disagg.Frontend, "round-robin"),
    ("disagg", disagg_router.Frontend, "component"),
    ("disagg_gpu", disagg.Frontend, "round-robin"),
    ("disagg_2p2d", disagg.Frontend, "kv"),
    ("disagg_planner", disagg_planner.Frontend, "kv"),
    ("static_1p1d", disagg.Frontend, "round-robin"),
    ("chaos", disagg_router.Frontend, "component"),
    ("gpu_check", disagg.Frontend, "round-robin"),
]


def shipped(file: str, graph: Graph) -> GraphConfig:
    """A packaged configuration, which listens on loopback only."""
    document = read_document(ROOT / "configs" / f"{file}.yaml", [])
    config = resolve(graph, document)
    document.raise_mistakes()
    [host] = [options["host"] for options in describe(config).values() if "host" in options]
    assert is_loopback(host) and is_loopback(config.shared.bind_host)
    return config


@pytest.mark.parametrize(("file", "graph", "router"), SHIPPED)
def test_shipped_configurations_resolve(file: str, graph: Graph, router: str):
    config = shipped(file, graph)
    assert set(describe(config)) == {"Graph", *(s.name for s in graph.services)}
    assert describe(config)["Frontend"]["router"] == router


def test_static_disaggregation_has_no_short_prompt_and_no_full_queue():
    worker = shipped("static_1p1d", disagg.Frontend).get("VllmWorker")
    assert worker is not None
    thresholds = DisaggOptions(
        **{f.name: worker.options[f.name] for f in dataclasses.fields(DisaggOptions)}
    )
    for prompt, jobs in ((2, 0), (8192, worker.options["max_prefill_queue_size"] - 1)):
        seen = QueueSeen(jobs=jobs, prefill_workers=1, age_s=0.0)
        inputs = DecisionInputs(prompt_tokens=prompt, cached_tokens=0, queue=seen)
        assert decide(inputs, thresholds) == DecisionReason.LONG


#: File, protocol, and where each engine's side of the handover listens, with its role.
FORWARDERS = [
    ("forward_nixl", "nixl", ["127.0.0.1:8100 prefill", "127.0.0.1:8200 decode"]),
    ("forward_nixl_push", "nixl-push", ["127.0.0.1:8100 prefill", "127.0.0.1:8200 decode"]),
    ("forward_mooncake", "mooncake", ["127.0.0.1:8998 prefill", "127.0.0.1:8998 decode"]),
    ("forward_sglang", "sglang", ["127.0.0.1:8998 prefill", "127.0.0.1:8998 decode"]),
    ("forward_neuron", "neuron-dynamic", ["127.0.0.1:8100 prefill", "127.0.0.1:8200 decode"]),
    ("forward_kvt", "kvt-staged", ["127.0.0.1:28100 prefill", "127.0.0.1:28200 decode"]),
    ("forward_joined", "nixl", []),
]


@pytest.mark.parametrize(("file", "protocol", "engines"), FORWARDERS)
def test_the_forwarders_configurations_resolve(file: str, protocol: str, engines: list[str]):
    service = shipped(file, forward.Forwarder).get("Forwarder")
    assert service is not None
    options = msgspec.convert(service.options, ForwarderConfig)
    assert options.protocol == protocol
    assert [
        f"{host_port(*one.transfer_address(protocol))} {one.role}" for one in options.engines
    ] == engines
    assert options.discovers is not bool(engines)


def test_every_shipped_configuration_is_tested():
    tested = {file for file, _, _ in (*SHIPPED, *FORWARDERS)}
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == tested


def engines(**changes: Any) -> dict[str, Any]:
    return {"engines": [{"url": "http://a:1", "role": "decode", **changes}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"protocol": "nxl"}, ".protocol: expected 'nixl' or 'nixl-push'"),
        (engines(role="prefill"), ": no engine decodes"),
        ({"engines": [], "discover": False}, ": no engines; list some"),
        (engines(role="both"), ".engines.0.role: expected 'prefill' or 'decode' or"),
        (engines(url="ftp://a:1"), ".engines.0: expected http://HOST:PORT"),
        (
            engines(transferport=1),
            ".engines.0.transferport: unknown key; did you mean transfer-port?",
        ),
    ],
)
def test_mistakes_about_engines(load: Loader, fields: dict[str, Any], message: str):
    good = engines(**{"transfer-port": 5})
    load({"Forwarder": good}, graph=forward.Forwarder)
    [mistake] = load.mistakes({"Forwarder": good | fields}, graph=forward.Forwarder)
    assert f"Forwarder{message}" in mistake


@pytest.mark.parametrize(
    ("variable", "default", "place"),
    [
        ("OMP_NUM_THREADS", None, {}),
        ("VLLM_NO_USAGE_STATS", "1", {}),
        ("VLLM_MAX_IMAGE_PIXELS", "33554432", {}),
        ("UCX_RCACHE_MAX_UNRELEASED", "1024", {}),
        ("UCX_TCP_PUT_ENABLE", "n", {}),
        ("UCX_TCP_TX_SEG_SIZE", "64k", {}),
        ("UCX_TCP_CONN_NB", "y", {}),
        # KV ports are opened where the graph listens.
        ("UCX_NET_DEVICES", "lo", {"bind_host": "127.0.0.1"}),
        ("UCX_NET_DEVICES", None, {"bind_host": "0.0.0.0"}),
        # Undelivered KV is dropped before its blocks are released.
        *(("UCX_TCP_USER_TIMEOUT", f"{s * 400}ms", {"lease_ttl_s": s}) for s in (2, 10, 30)),
        ("UCX_TCP_USER_TIMEOUT", None, {}),
        ("VLLM_MEDIA_URL_ALLOW_REDIRECTS", None, {}),
        (
            "VLLM_MEDIA_URL_ALLOW_REDIRECTS",
            "0",
            {"flags": {"allowed-media-domains": ["a.example"]}},
        ),
    ],
)
def test_the_service_s_environment_goes_before_ours_and_ours_before_a_default(
    monkeypatch: pytest.MonkeyPatch, variable: str, default: str | None, place: dict[str, Any]
):
    monkeypatch.delenv(variable, raising=False)
    assert child_environment({}, **place).get(variable) == default
    monkeypatch.setenv(variable, "7")
    assert child_environment({}, **place)[variable] == "7"
    assert child_environment({variable: "8"}, **place)[variable] == "8"


def test_a_fixed_status_port_is_the_first_of_a_service_s_processes(load: Loader):
    config = load(GOOD, "--VllmWorker.ServiceArgs.status-port=9000")
    assert [service.status_port for service in config.services] == [0, 9000, 0]
    assert describe(config)["VllmWorker"]["ServiceArgs"]["status-port"] == 9000


def test_engines_do_not_inherit_the_urls_of_the_servers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DYNAMO_LITE_NATS_URL", "nats://me:only-in-urls@h:1")
    monkeypatch.setenv("DYNAMO_LITE_ETCD_URL", "http://me:only-in-urls@h:2")
    monkeypatch.setenv("HF_HOME", "/models")
    own = {variable: "nats://me:only-in-urls@h:3" for variable in VARIABLES.values()}
    environment = child_environment(own)
    assert environment["HF_HOME"] == "/models"
    assert not any("only-in-urls" in value for value in environment.values())
