"""The planner's limits: the numbers that a role may have, and options that fit together. Pure."""

from collections.abc import Mapping

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.protocol.options import PlannerOptions


def bounds(limits: PlannerOptions, role: Role) -> tuple[int, int]:
    """Fewest and most workers of a role."""
    if role == Role.PREFILL:
        return limits.prefill_min, max(limits.prefill_max, limits.prefill_min)
    return limits.decode_min, max(limits.decode_max, limits.decode_min)


def contradictions(limits: PlannerOptions) -> list[str]:
    """Mistakes that no single option shows, each as a sentence. A worker counts as one device."""
    found = [
        f"{role.word}-min is {least} and {role.word}-max is {most}: the minimum must not be above"
        for role, least, most in (
            (Role.PREFILL, limits.prefill_min, limits.prefill_max),
            (Role.DECODE, limits.decode_min, limits.decode_max),
        )
        if least > most
    ]
    if (least := limits.prefill_min + limits.decode_min) > limits.budget_devices:
        found.append(
            f"prefill-min and decode-min are {least} together, more than budget-devices,"
            f" {limits.budget_devices}"
        )
    return found


def refusals(wanted: Mapping[str, int], limits: PlannerOptions) -> list[str]:
    """Why an operator cannot have these numbers, each as a sentence."""
    return [
        f"{number} {role.word} workers: {role.word}-min is {least} and {role.word}-max is {most}"
        for role, number in ((Role(name), number) for name, number in wanted.items())
        for least, most in [bounds(limits, role)]
        if not least <= number <= most
    ]
