"""No argument of vLLM's passes the check and then does nothing.

Every argument that vLLM's parsers know is refused with a reason, or taken by the Frontend's
own server, or read by vLLM's code when an app or an engine is configured from it. The last is
watched, so that a new version of vLLM cannot add one that is dropped on the way.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.usage.usage_lib import UsageContext

from dynamo_lite.serve.document import field_keys
from dynamo_lite.serve.services.services import FRONTEND, PREFILL_WORKER, VLLM_WORKER
from dynamo_lite.vllm.accepted_args import SectionKind, groups_of, refusal
from dynamo_lite.vllm.args import _parser, check
from dynamo_lite.vllm.frontend import openai_app
from tests.vllm.front_half import open_front, write_model
from tests.vllm.seams import vllm_minor

#: Read by vLLM's app when a request needs it, or only together with another argument.
READ_LATER = {
    "tool-parser-plugin",  # by `parse_args` of the Frontend, before the app is made
    "reasoning-parser-plugin",
    "max-log-len",  # with enable-log-requests
    "sse-keep-alive-interval",  # for each stream
    "cohere-is-reasoning-model",  # for each request to /cohere
}
#: Refused arguments that vLLM has from 0.32 on.
_SINCE_32 = {"custom-histogram-buckets", "grpc-port", "sleep-mode-offload-cudagraph"}
LATER = _SINCE_32 if vllm_minor() < 32 else set[str]()
#: Read in `EngineArgs.__post_init__`.
READ_AT_ONCE = {"enable-return-routed-experts"}


def arguments(kind: SectionKind) -> dict[str, str]:
    """The title of the group of each argument, without `--no-...` and `--help`."""
    groups = groups_of(_parser(kind))
    return {
        key: group
        for key, group in groups.items()
        if key != "help" and not (key.startswith("no-") and key[3:] in groups)
    }


def accepted(kind: SectionKind) -> set[str]:
    """The fields that they set, without arguments that a service's section takes as its own
    option."""
    fields = {
        option.removeprefix("--"): action.dest.replace("_", "-")
        for action in _parser(kind)._actions
        for option in action.option_strings
    }
    services = {"frontend": [FRONTEND], "engine": [VLLM_WORKER, PREFILL_WORKER]}[kind]
    own = set.intersection(*({*field_keys(s.config)} for s in services))
    return {
        fields[key]
        for key, group in arguments(kind).items()
        if key not in own and not refusal(kind, key, group)
    }


@contextmanager
def reads_of_engine_args(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Fields of `EngineArgs` that are read meanwhile, other than to copy them all."""
    read: set[str] = set()

    def get(self: object, name: str) -> object:
        if sys._getframe(1).f_code.co_name not in ("__post_init__", "__init__", "__repr__"):
            read.add(name.replace("_", "-"))
        return object.__getattribute__(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(EngineArgs, "__getattribute__", get)
        yield read


class Watched(Namespace):
    read: set[str]

    def __getattribute__(self, name: str) -> object:
        caller = sys._getframe(1)
        callers = (caller.f_code.co_name, caller.f_back and caller.f_back.f_code.co_name)
        # It copies all of them.
        if not name.startswith("_") and "from_cli_args" not in callers:
            object.__getattribute__(self, "__dict__")["read"].add(name.replace("_", "-"))
        return object.__getattribute__(self, name)


async def test_what_the_frontend_takes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parse, read_args = openai_app.parse_args, set[str]()

    def watched(flags: list[str]) -> Namespace:
        return Watched(**vars(parse(flags)), read=read_args)

    monkeypatch.setattr(openai_app, "parse_args", watched)
    with reads_of_engine_args(monkeypatch) as read:
        async with open_front(write_model(tmp_path)):
            pass
    unread = accepted("frontend") - read - read_args - READ_LATER
    assert sorted(unread) == []


def test_what_a_worker_takes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    args = AsyncEngineArgs(model=str(write_model(tmp_path)), max_model_len=256, enable_lora=True)
    with reads_of_engine_args(monkeypatch) as read:
        args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    assert sorted(accepted("engine") - read - READ_AT_ONCE) == []


@pytest.mark.parametrize("kind", ["frontend", "engine"])
def test_what_is_refused_is_an_argument_of_vllms(kind: SectionKind):
    """Names in the tables that vLLM does not know would be slips."""
    from dynamo_lite.vllm import accepted_args as tables

    known = arguments(kind)
    own = tables._FRONTEND if kind == "frontend" else {*tables._ENGINE} - {"lora-modules"}
    assert sorted({*own} - set(known) - LATER) == []
    assert sorted({*tables._BOTH} - set(arguments("frontend")) - LATER) == []


@pytest.mark.parametrize(
    ("kind", "key", "value", "says"),
    [
        ("frontend", "uds", "/tmp/x", "listens on TCP"),
        ("engine", "enable-lora", True, ""),
        ("engine", "lora-modules", ["a=/a"], "section of the Frontend"),
        ("engine", "enable-tower-connector-lora", True, "not supported here"),
        ("engine", "kv-transfer-config", {}, ""),
        ("frontend", "kv-transfer-config", {}, "sections of the workers"),
        ("engine", "kv-events-config", {}, "set by dynamo-lite itself"),
        ("frontend", "grpc", True, "not supported here"),
        ("frontend", "api-server-count", 2, "Frontend.ServiceArgs.workers"),
        ("frontend", "tensor-parallel-size", 2, "sections of the workers"),
        ("frontend", "max-num-seqs", 2, "sections of the workers"),
        ("engine", "stream-interval", 2, "section of the Frontend"),
        ("engine", "enable-sleep-mode", True, "not put to sleep here"),
        ("frontend", "ssl-certfile", "cert.pem", ""),
        ("engine", "tensor-parallel-size", 2, ""),
    ],
)
def test_the_check_says_why(kind: SectionKind, key: str, value: object, says: str):
    mistakes = check({"S": {"kind": kind, "args": {key: value}}})
    assert [m["key"] for m in mistakes] == ([key] if says else [])
    assert all(says in m["message"] for m in mistakes)
