"""Renders a planner's state and decisions for the terminal, and as JSON."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_lite.cli.planner import PlannerState
from dynamo_lite.protocol.planner import PlannerDecision, PlannerReport


def as_json(state: PlannerState) -> dict[str, Any]:
    return {
        "planners": [
            {"lease": f"{lease_id:x}", **facts} for lease_id, facts in state.planners.items()
        ],
        "leader": f"{state.leader.lease_id:x}" if state.leader else None,
        "target": msgspec.to_builtins(state.target),
        "paused": msgspec.to_builtins(state.paused),
        "operations": [msgspec.to_builtins(operation) for operation in state.operations],
        "malformed": state.malformed,
    }


def as_text(state: PlannerState) -> str:
    lines = [f"! ignored: {problem}" for problem in state.malformed]
    if not state.planners:
        return "\n".join([*lines, "no planner runs"])
    facts = state.shown
    refused = facts.get("refused", {})
    lines += [f"! the planner ignores {key}: {why}" for key, why in refused.items()]
    if state.leader is None:
        lines.append("no planner leads")
    else:
        others = len(state.planners) - 1
        more = f", {others} more ready to take over" if others else ""
        silent = "" if state.led_by else ", but it does not respond"
        lines.append(f"planner {state.leader.lease_id:x} leads{silent}{more}")
    if facts.get("hold"):
        lines.append(f"hold: {facts['hold']}")
    if state.paused is not None:
        why = f": {state.paused.reason}" if state.paused.reason else ""
        lines.append(f"paused by {state.paused.by}{why}")
    if state.target is not None and state.target.manual:
        numbers = ", ".join(f"{name}={count}" for name, count in state.target.manual.items())
        lines.append(f"set by an operator, not reached yet: {numbers}")
        reasons = {one["component"]: one["reason"] for one in facts.get("roles", [])}
        for name in state.target.manual:
            if name in reasons:
                lines.append(f"  {name}: {reasons[name]}")
        lines.append("  `dynamo-lite planner unset` gives them back to the planner")
    rows = [("COMPONENT", "COUNT", "WANTED", "STATE", "REASON")]
    rows += [
        (
            one["component"],
            str(one["count"]),
            "?" if one["wanted"] is None else str(one["wanted"]),
            one["state"],
            one["reason"],
        )
        for one in facts.get("roles", [])
    ]
    lines += ["", *_table(rows)] if len(rows) > 1 else []
    for operation in state.operations:
        age = max(time.time() - operation.at, 0.0)
        which = f" of {operation.lease_id:x}" if operation.lease_id else ""
        lines.append(
            f"under way: {operation.kind} {operation.component}{which} to {operation.count},"
            f" {operation.phase}, for {age:.0f} s: {operation.reason}"
        )
    return "\n".join(lines)


def report_as_json(report: PlannerReport) -> dict[str, Any]:
    return {
        "lease": f"{report.lease_id:x}",
        "leads": report.leads,
        "decisions": [msgspec.to_builtins(decision) for decision in report.decisions],
    }


def report_as_text(report: PlannerReport) -> str:
    role = "leads" if report.leads else "does not lead"
    parts = [f"planner {report.lease_id:x} {role}"]
    now = time.time()
    parts += ["\n".join(_decision(each, now)) for each in report.decisions]
    return "\n\n".join(parts)


def _decision(decision: PlannerDecision, now: float) -> list[str]:
    clock = time.strftime("%H:%M:%S", time.localtime(now - decision.age_s))
    lines = [f"{clock}  hold: {decision.hold}" if decision.hold else clock]
    would = "would do" if decision.hold else "does"
    lines += [f"  {would}: {action}" for action in decision.actions]
    for one in decision.roles:
        wanted = "?" if one.wanted is None else one.wanted
        lines.append(f"  {one.component}: {one.count} of {wanted}, {one.state}: {one.reason}")
    return lines


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]])
        for row in rows
    ]
