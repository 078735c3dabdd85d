"""The planner's limits: the numbers that a role may have, and options that fit together. Pure."""

from collections.abc import Mapping

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.protocol.options import PlannerOptions


def bounds(limits: PlannerOptions, role: Role) -> tuple[int, int]:
    """Fewest and most workers of a role."""
    if role == Role.PREFILL:
        return limits.prefill_min, max(limits.prefill_max, limits.prefill_min)
    return limits.decode_min, max(limits.decode_max, limits.decode_min)


def occupied(devices: int) -> int:
    """What a worker with so many devices takes of the budget: without a device it counts as one."""
    return max(devices, 1)


def contradictions(limits: PlannerOptions, devices: Mapping[str, int] | None = None) -> list[str]:
    """Mistakes that no single option shows, each as a sentence.

    devices: of one worker. A role that is not in it, and a worker without a device, counts as one.
    """
    found = [
        f"{role.word}-min is {least} and {role.word}-max is {most}: the minimum must not be above"
        for role, least, most in (
            (Role.PREFILL, limits.prefill_min, limits.prefill_max),
            (Role.DECODE, limits.decode_min, limits.decode_max),
        )
        if least > most
    ]
    each = {role: occupied((devices or {}).get(role, 0)) for role in Role}
    prefill, decode = (f"{bounds(limits, r)[0]} * {each[r]}" for r in (Role.PREFILL, Role.DECODE))
    least = sum(bounds(limits, role)[0] * count for role, count in each.items())
    if least > limits.budget_devices:
        found.append(
            f"prefill-min ({prefill}) and decode-min ({decode}) need {least} devices together, more"
            f" than budget-devices, {limits.budget_devices}"
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
