"""The log format of all processes and of their engines' processes.

Owns the two forms: text, and one JSON object per line. Log calls contain `request %s` and
`attempt %s` for ids. The JSON form takes ids from these arguments only, so that text from a
client or a server cannot be mistaken for an id.
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
    """Adds this lease to all JSON lines of this process from now on."""
    _holder["lease"] = f"{lease_id:x}"


def logging_config(
    form: LogFormat, component: str, instance: int, *, level: str, vllm_level: str = "INFO"
) -> dict[str, Any]:
    """A configuration for `logging.config.dictConfig`, and as JSON for vLLM's
    VLLM_LOGGING_CONFIG_PATH, so that a process and its engine's processes log in one format.

    level: the level of this package's loggers.
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
        # Set for this package too: a package that vLLM imports raises the root's level.
        "loggers": {"dynamo_lite": {"level": level}, "vllm": {"level": vllm_level}},
        "root": {"handlers": ["stderr"], "level": level},
    }


class TextLines(logging.Formatter):
    def __init__(self, component: str, instance: int):
        super().__init__(f"%(asctime)s %(levelname)s {component}-{instance} %(name)s: %(message)s")


class JsonLines(logging.Formatter):
    """One JSON object per line. `time` is RFC 3339 in UTC. Unknown fields are left out."""

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
    """The ids in the line: `request_id` and `attempt`, if it has them."""
    args = record.args
    if not isinstance(record.msg, str) or not isinstance(args, tuple):
        return {}
    places = _places(record.msg)
    known = ((name, args[place]) for name, place in places if place < len(args))
    return {name: str(value) for name, value in known if value is not None}


@lru_cache(maxsize=1024)
def _places(template: str) -> tuple[tuple[str, int], ...]:
    """The name of each id in a log template, and the index of its argument."""
    found: dict[str, int] = {}
    conversions = (match for match in _CONVERSION.finditer(template) if match[0] != "%%")
    for place, match in enumerate(conversions):
        for word, name in _NAMED.items():
            if match[0] == "%s" and template.endswith(word, 0, match.start()):
                found.setdefault(name, place)
    return tuple(found.items())
