"""The planner's limits: the numbers that a role may have, and options that fit together. Pure."""

from collections.abc import Mapping

from dynamo_lite.policy.planner_inputs import Role
from dynamo_lite.protocol.options import PlannerOptions


def bounds(limits: PlannerOptions, role: Role) -> tuple[int, int]:
    """Fewest and most workers of a role."""
    if role == Role.PREFILL:
        return limits.prefill_min, max(limits.prefill_max, limits.prefill_min)
    return limits.decode_min, max(limits.decode_max, limits.decode_min)


def contradictions(limits: PlannerOptions) -> list[str]:
    """Mistakes that no single option shows, each as a sentence."""
    found = [
        f"{role.value}-min is {least} and {role.value}-max is {most}: the minimum must not be above"
        for role, least, most in (
            (Role.PREFILL, limits.prefill_min, limits.prefill_max),
            (Role.DECODE, limits.decode_min, limits.decode_max),
        )
        if least > most
    ]
    least = limits.prefill_min + limits.decode_min
    if least > limits.budget_devices:
        found.append(
            f"prefill-min and decode-min are {least} workers together, more than budget-devices,"
            f" {limits.budget_devices}"
        )
    if limits.down_share >= min(limits.prefill_up_share, limits.decode_up_share):
        found.append("down-share must be below prefill-up-share and decode-up-share")
    return found


def refusals(
    wanted: Mapping[Role, int],
    counts: Mapping[Role, int],
    devices: Mapping[Role, int],
    limits: PlannerOptions,
) -> list[str]:
    """Why an operator cannot have these numbers, each as a sentence.

    counts: the present numbers. devices: of one worker. Roles that the graph does not have are in
    neither.
    """
    found: list[str] = []
    for role, number in wanted.items():
        least, most = bounds(limits, role)
        if not least <= number <= most:
            found.append(
                f"{number} {role.value} workers: {role.value}-min is {least}"
                f" and {role.value}-max is {most}"
            )
    total = sum(n * max(devices.get(r, 0), 1) for r, n in {**counts, **wanted}.items())
    if not found and total > limits.budget_devices:
        found.append(f"{total} devices together, and budget-devices is {limits.budget_devices}")
    return found
