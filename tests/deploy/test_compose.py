"""The compose file: against its schema, the command line, and the image."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dynamo_lite import __version__
from tests.deploy.command_lines import DEPLOY, Served, served, variables

SERVICES = ("frontend", "decode", "prefill")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    folder = files("check_jsonschema") / "builtin_schemas" / "vendor"
    return json.loads((folder / "compose-spec.json").read_text())


def command_of(compose: dict[str, Any], name: str) -> Served:
    mounted = {one["target"]: one["source"] for one in compose["services"][name]["configs"]}
    paths = {
        target: DEPLOY / compose["configs"][source]["file"] for target, source in mounted.items()
    }
    return served(compose["services"][name]["command"], paths)


def test_it_is_a_compose_file(compose: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema.validate(compose, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**compose, "service": {}}, schema)
    for file in compose["configs"].values():
        assert (DEPLOY / file["file"]).is_file()


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_starts_its_service_and_is_stopped_in_time(
    compose: dict[str, Any], name: str
) -> None:
    container, command = compose["services"][name], command_of(compose, name)
    service = {"frontend": "Frontend", "decode": "VllmWorker", "prefill": "PrefillWorker"}[name]
    assert command.options["service_name"] == service
    assert command.options["log_to"] == "stderr"
    assert command.config.shared.bind_host == "0.0.0.0"
    assert command.options["secret_file"] == Path("/run/secrets") / container["secrets"][0]
    assert seconds(container["stop_grace_period"]) >= command.longest_stop_s
    assert set(container["environment"]) == variables()
    [asked] = [word for word in container["healthcheck"]["test"] if "http" in word]
    assert f"http://127.0.0.1:{command.service.status_port}/ready" in asked
    assert container["image"] == f"dynamo-lite:{__version__}-cpu"
    assert container["build"]["target"] == "cpu"
    assert (DEPLOY / container["build"]["context"] / container["build"]["dockerfile"]).is_file()


def test_the_published_port_is_the_frontend_s(compose: dict[str, Any]) -> None:
    port = command_of(compose, "frontend").service.options["port"]
    assert compose["services"]["frontend"]["ports"] == [f"127.0.0.1:8000:{port}"]


@pytest.mark.parametrize("name", [*SERVICES, "nats", "etcd"])
def test_containers_can_do_no_more_than_they_must(compose: dict[str, Any], name: str) -> None:
    container = compose["services"][name]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert "healthcheck" in container


def test_the_services_use_the_servers_of_the_file(compose: dict[str, Any]) -> None:
    environment = compose["services"]["frontend"]["environment"]
    hosts = {url.partition("://")[2].partition(":")[0] for url in environment.values()}
    assert hosts == {"nats", "etcd"} == set(compose["services"]["frontend"]["depends_on"])


def test_the_example_graph_of_kubernetes_is_the_same() -> None:
    other = DEPLOY / "kubernetes" / "overlays" / "cpu" / "graph.yaml"
    assert without_head(other) == without_head(DEPLOY / "graph.yaml")


def without_head(path: Path) -> str:
    return path.read_text().partition("\n\n")[2]


def seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration.removesuffix("s"))
