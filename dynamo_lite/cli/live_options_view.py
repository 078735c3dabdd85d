"""How `config get` and its siblings show live options, and which processes use them."""

import time
from typing import Any

from msgspec import UNSET, to_builtins

from dynamo_lite.cli.listing import table
from dynamo_lite.cli.live_options import Record, RecordChange, accepted, differences, options_of


def follows(process: dict[str, Any], version: int) -> bool:
    """Whether all parts of the process use this version."""
    return process["version"] == version and process.get("engine_version") in (None, version)


def as_json(
    component: str, record: Record | None, processes: list[dict[str, Any]]
) -> dict[str, Any]:
    version = record.version if record else 0
    return {
        "component": component,
        "version": version,
        "by": record.by if record else "",
        "at": record.at if record else None,
        "values": to_builtins(record.values) if record else {},
        "accepted": {option: accepted(component, option) for option in options_of(component)},
        "processes": [{**process, "follows": follows(process, version)} for process in processes],
    }


def as_text(
    component: str, record: Record | None, processes: list[dict[str, Any]], only: str = ""
) -> str:
    """only: this option; else all of them, and the processes that follow."""
    rows: list[tuple[str, ...]] = []
    for option, field in options_of(component).items():
        if only in ("", option):
            value = getattr(record.values, field) if record else UNSET
            live = "-" if value is UNSET else _text(value)
            in_file = sorted({_text(w["file"].get(option)) for w in processes if "file" in w})
            file = ", ".join(in_file) or "?"
            rows.append((f"{component}.{option}", live, file, accepted(component, option)))
    version = record.version if record else 0
    following = [process for process in processes if follows(process, version)]
    lines = [
        table(("key", "live", "file", "accepted"), rows),
        "",
        f"{_origin(record)}; followed by {len(following)} of {len(processes)} live processes",
    ]
    lines += [f"  {_laggard(process)}" for process in processes if process not in following]
    return "\n".join(lines)


def change_lines(change: RecordChange) -> list[str]:
    """One line for each value that differs."""
    said = f"version {change.new.version} by {change.new.by}" if change.new else "record removed"
    rows = differences(change)
    if not rows:
        return [f"{change.component}: {said}: no value differs"]
    return [f"{key}: {_live(old)} -> {_live(new)}  ({said})" for key, old, new in rows]


def _origin(record: Record | None) -> str:
    if record is None:
        return "version 0: no changes, all values are those of the configuration file"
    age_s = max(0, round(time.time() - record.at))
    return f"version {record.version} by {record.by or 'unknown'}, {age_s} s ago"


def _laggard(process: dict[str, Any]) -> str:
    name = f"lease {process['lease']}, pid {process['pid']}"
    if process["version"] is None:
        return f"{name}: does not answer"
    said = f"{name}: version {process['version']}"
    if process.get("engine_version") not in (None, process["version"]):
        said += f", its engine {process['engine_version']}"
    return (
        f"{said}; refuses the record in etcd: {process['refused']}"
        if process.get("refused")
        else said
    )


def _live(value: Any) -> str:
    return "(file)" if value is UNSET else _text(value)


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
