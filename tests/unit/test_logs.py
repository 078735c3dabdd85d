"""Log lines as text and as JSON, and the requests that they are about."""

import io
import json
import logging
import logging.config
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.runtime.process import logs
from dynamo_lite.runtime.process.logs import JsonLines, LogFormat, ids, logging_config

PACKAGE = Path(logs.__file__).parents[2]


@pytest.fixture(autouse=True)
def no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_holder", {})


def record(template: Any, *args: Any, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("dynamo_lite.x", logging.WARNING, "f", 1, template, args, None)
    vars(made).update(fields)
    return made


def line(made: logging.LogRecord) -> dict[str, Any]:
    text = JsonLines("VllmWorker", 3).format(made)
    assert "\n" not in text
    return json.loads(text)


def test_a_json_line_has_what_is_known() -> None:
    assert line(record("up %d", 1, created=1_000_000_000.25, process=7)) == {
        "time": "2001-09-09T01:46:40.250Z",
        "level": "WARNING",
        "logger": "dynamo_lite.x",
        "component": "VllmWorker",
        "instance": 3,
        "pid": 7,
        "message": "up 1",
    }
    logs.hold_lease(0x2C1A)
    assert line(record("x"))["lease"] == "2c1a"


def test_exceptions_and_odd_text_stay_on_one_line() -> None:
    try:
        raise KeyError("a\nb")
    except KeyError as exc:
        told = line(record('a\n"b" \ud800 é', exc_info=(KeyError, exc, exc.__traceback__)))
    assert told["message"] == 'a\n"b" \ud800 é'
    assert told["exception"].startswith("Traceback") and "KeyError" in told["exception"]


@pytest.mark.parametrize(
    ("template", "args", "found"),
    [
        ("request %s: %s", ("r1", "gone"), {"request_id": "r1"}),
        (
            "%d%% of request %s: attempt %s ended: %.1f",
            (5, "r1", "a1", 0.5),
            {"request_id": "r1", "attempt": "a1"},
        ),
        ("request %s waits for request %s", ("r1", "r2"), {"request_id": "r1"}),
        ("worker at %s: %s", ("h:1", "request forged"), {}),
        ("%d requests lost", (3,), {}),
        ("request %s: request forged", ({"a": 1},), {}),
        ("request %s", (), {}),
        ("request %s: attempt %s: untold", (None, "a1"), {"attempt": "a1"}),
    ],
)
def test_ids_are_what_the_log_call_says_and_nothing_else(
    template: str, args: tuple[Any, ...], found: dict[str, str]
) -> None:
    assert ids(record(template, *args)) == found


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_configuration_is_plain_json_and_makes_such_lines(form: LogFormat) -> None:
    config = json.loads(json.dumps(logging_config(form, "Router", 0, level="INFO")))
    root, ours = logging.getLogger(), logging.getLogger("dynamo_lite")
    kept = root.handlers[:], root.level, ours.level, logging.getLogger("vllm").level
    try:
        logging.config.dictConfig(config)
        [handler] = root.handlers
        assert isinstance(handler, logging.StreamHandler)
        stream = io.StringIO()
        handler.setStream(stream)
        root.setLevel("ERROR")  # as a package of vLLM's does
        logging.getLogger("dynamo_lite.engine").info("request %s: here", "r1")
        logging.getLogger("dynamo_lite.engine").debug("not this one")
        [said] = stream.getvalue().splitlines()
    finally:
        root.handlers[:], level, our_level, vllm_level = kept
        root.setLevel(level)
        ours.setLevel(our_level)
        logging.getLogger("vllm").setLevel(vllm_level)
    if form == "json":
        assert json.loads(said)["request_id"] == "r1"
    else:
        assert said.endswith(" INFO Router-0 dynamo_lite.engine: request r1: here")
