"""The compose file: against its schema, the command line, and the image."""

import json
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from dynamo_lite import __version__
from dynamo_lite.runtime.address import has_credentials
from dynamo_lite.serve.document import read_document
from tests.deploy.command_lines import DEPLOY, Served, served, variables
from tests.deploy.compose import read_compose

SERVICES = ("frontend", "decode", "prefill")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read_compose()


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
    assert command.config.shared.certificates == "/etc/dynamo-lite-access"
    assert seconds(container["stop_grace_period"]) >= command.longest_stop_s
    assert set(container["environment"]) == variables()
    inbox = f"&inbox=_INBOX_dynamo-{service}"
    assert container["environment"]["DYNAMO_LITE_NATS_URL"].endswith(inbox)
    assert not any(has_credentials(url) for url in container["environment"].values())
    [asked] = [word for word in container["healthcheck"]["test"] if "http" in word]
    assert f"https://127.0.0.1:{command.service.status_port}/ready" in asked
    assert container["image"] == f"dynamo-lite:{__version__}-cpu"
    assert container["build"]["target"] == "cpu"
    assert (DEPLOY / container["build"]["context"] / container["build"]["dockerfile"]).is_file()


def test_the_example_graph_of_kubernetes_is_the_same_but_for_the_queue() -> None:
    other = read_document(DEPLOY / "kubernetes" / "overlays" / "cpu" / "graph.yaml", []).tree
    ours = read_document(DEPLOY / "graph.yaml", []).tree
    queue = {**ours["Common"]["queue"], "replicas": 3, "storage": "file"}
    assert other == {**ours, "Common": {**ours["Common"], "queue": queue}}


def seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration.removesuffix("s"))
