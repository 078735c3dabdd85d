"""Lines in the logs of a graph's processes, and of their engines'.

Owns their two forms: text, and one JSON object per line. Log calls say `request %s` and
`attempt %s` where they are about one: by this the JSON form finds the ids, so that no
text of a client or a server can pass for one.
"""

import json
import logging
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

LogFormat = Literal["text", "json"]

_CONVERSION = re.compile(r"%(%|[^a-zA-Z%]*[a-zA-Z])")
_NAMED = {"request ": "request_id", "attempt ": "attempt"}

_holder: dict[str, str] = {}


def hold_lease(lease_id: int) -> None:
    """This process's JSON lines name this lease from now on."""
    _holder["lease"] = f"{lease_id:x}"


def logging_config(
    form: LogFormat, component: str, instance: int, *, level: str, vllm_level: str = "INFO"
) -> dict[str, Any]:
    """For `logging.config.dictConfig`, and as JSON for vLLM's VLLM_LOGGING_CONFIG_PATH: then
    all that a process and its engine's processes log looks the same.

    level: of our own lines.
    """
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            form: {
                "()": f"{__name__}.{'JsonLines' if form == 'json' else 'TextLines'}",
                "component": component,
                "instance": instance,
            }
        },
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": form,
                "stream": "ext://sys.stderr",
            }
        },
        # The level of our own is their own: a package that vLLM imports raises the root's.
        "loggers": {"dynamo_lite": {"level": level}, "vllm": {"level": vllm_level}},
        "root": {"handlers": ["stderr"], "level": level},
    }


class TextLines(logging.Formatter):
    def __init__(self, component: str, instance: int):
        super().__init__(f"%(asctime)s %(levelname)s {component}-{instance} %(name)s: %(message)s")


class JsonLines(logging.Formatter):
    """time: RFC 3339, UTC. Absent: what is not known, or not there."""

    def __init__(self, component: str, instance: int):
        super().__init__()
        self._origin = {"component": component, "instance": instance}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            **self._origin,
            **_holder,
            "pid": record.process,
            "message": record.getMessage(),
            **ids(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, separators=(",", ":"))


def ids(record: logging.LogRecord) -> dict[str, str]:
    """What the line is about: `request_id`, `attempt`."""
    args = record.args
    if not isinstance(record.msg, str) or not isinstance(args, tuple):
        return {}
    places = _places(record.msg)
    known = ((name, args[place]) for name, place in places if place < len(args))
    return {name: str(value) for name, value in known if value is not None}


@lru_cache(maxsize=1024)
def _places(template: str) -> tuple[tuple[str, int], ...]:
    """The name of each id in a log call, and which argument it is."""
    found: dict[str, int] = {}
    conversions = (match for match in _CONVERSION.finditer(template) if match[0] != "%%")
    for place, match in enumerate(conversions):
        for word, name in _NAMED.items():
            if match[0] == "%s" and template.endswith(word, 0, match.start()):
                found.setdefault(name, place)
    return tuple(found.items())
