"""Whether a planner's budget has room for the workers of its graph."""

import msgspec

from dynamo_lite.policy.scaling.limits import contradictions, occupied
from dynamo_lite.serve.config import GraphConfig
from dynamo_lite.serve.document import Document
from dynamo_lite.services.config import PlannerConfig
from dynamo_lite.services.planner.connector import COMPONENTS, by_role
from dynamo_lite.services.services import PLANNER


def check_planner_budget(config: GraphConfig, document: Document, *, only: str | None) -> None:
    """Adds to the document's mistakes what is beyond the budget of a planner that starts here.

    only: the service that is started alone. A planner of Kubernetes knows the devices of its
    workers by its own section, and the graph does not start them.
    """
    planner = config.get(PLANNER.name)
    # Without options after a mistake in its section.
    if planner is None or not planner.options or only not in (None, PLANNER.name):
        return
    options = msgspec.convert(planner.options, PlannerConfig)
    if not planner.workers or options.connector != "local":
        return
    where = (PLANNER.name, "budget-devices")
    workers = [one for name in COMPONENTS.values() if (one := config.get(name)) is not None]
    for mistake in contradictions(options, by_role({c.service.name: c.devices for c in workers})):
        document.complain(where, mistake)
    started = [c for c in workers if c.workers] if only is None else []
    need = sum(c.workers * occupied(c.devices) for c in started)
    if need > options.budget_devices:
        each = ", ".join(f"{c.service.name} {c.workers} * {occupied(c.devices)}" for c in started)
        document.complain(
            where,
            f"{options.budget_devices}, but the workers that the graph starts need {need} devices:"
            f" {each} (a worker without a device counts as one); raise the budget, or start fewer"
            " workers (ServiceArgs.workers)",
        )
