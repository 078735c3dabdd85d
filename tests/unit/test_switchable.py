"""What two roles must have in common, so that one engine can be of both."""

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.serve.switchable import check_switchable

FLAGS = {"model": "m", "max-num-seqs": 8, "enforce-eager": True}


def service(name: str, **changes: Any) -> Any:
    options = {"switchable": True, "remote_prefill": True}
    given = {
        "flags": FLAGS,
        "later_env": {"A": "1"},
        "fixed_env": "",
        "devices": 1,
        "options": options,
    }
    return SimpleNamespace(service=SimpleNamespace(name=name), **{**given, **changes})


def graph(**changes: dict[str, Any]) -> Any:
    found = {
        name: service(name, **changes.get(name, {})) for name in ("VllmWorker", "PrefillWorker")
    }
    return SimpleNamespace(get=found.get)


def mistakes(config: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        check_switchable(config)
    return refused.value.mistakes


def test_the_same_arguments_are_accepted():
    check_switchable(graph())
    check_switchable(SimpleNamespace(get=lambda name: None))  # type: ignore[arg-type]


def test_both_roles_must_be_switchable():
    off = {"switchable": False, "remote_prefill": True}
    (mistake,) = mistakes(graph(PrefillWorker={"options": off}))
    assert mistake.startswith("VllmWorker.switchable: ")
    check_switchable(graph(VllmWorker={"options": off}, PrefillWorker={"options": off}))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"flags": {**FLAGS, "max-num-seqs": 16}}, "max-num-seqs is 16"),
        ({"flags": {"model": "m", "max-num-seqs": 8}}, "enforce-eager is None"),
        ({"devices": 2}, "ServiceArgs.devices is 2"),
    ],
)
def test_what_a_running_engine_cannot_change_is_named(changed: dict[str, Any], name: str):
    (mistake,) = mistakes(graph(VllmWorker=changed))
    assert mistake.startswith(f"VllmWorker.{name}, PrefillWorker.")
    assert "a running engine cannot change it" in mistake


def test_no_message_has_the_value_of_a_variable_or_of_a_token():
    mine = {"later_env": {"HF_TOKEN": "hf_1"}, "flags": {**FLAGS, "hf-token": "hf_2"}}
    found = mistakes(graph(VllmWorker=mine))
    assert not [mistake for mistake in found if "hf_" in mistake]
    names = ("ServiceArgs.env.A ", "ServiceArgs.env.HF_TOKEN ", "hf-token is (a secret)")
    assert all(any(name in mistake for mistake in found) for name in names)


def test_a_variable_with_a_value_for_each_worker_is_named():
    (mistake,) = mistakes(graph(VllmWorker={"fixed_env": "ServiceArgs.env has a list for X"}))
    assert mistake.startswith("VllmWorker: ServiceArgs.env has a list for X; with switchable")


def test_options_of_a_role_that_the_engine_cannot_serve():
    no_remote = {"switchable": True, "remote_prefill": False}
    (mistake,) = mistakes(graph(VllmWorker={"options": no_remote}))
    assert mistake.startswith("VllmWorker.remote-prefill is false")
