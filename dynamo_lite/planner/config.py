"""The options of the Planner in the YAML file. The command line reads this module."""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.protocol.options import NaturalOption, PlannerOptions

#: A workload that can be scaled, as `deployments/NAME`; empty: none.
Workload = Annotated[
    str, msgspec.Meta(pattern=r"^(deployments/[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?\Z")
]


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The workloads that a planner scales, and how it reaches the API server."""

    decode: Workload = ""
    prefill: Workload = ""
    #: Devices of one worker, for the budget.
    decode_devices: NaturalOption = 1
    prefill_devices: NaturalOption = 1
    #: The API server.
    url: str = "https://kubernetes.default.svc"
    #: Folder with the files `token`, `ca.crt` and `namespace` of a service account.
    service_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"

    @property
    def workloads(self) -> dict[str, str]:
        """By component; empty: the supervisor of the graph scales."""
        each = {Role.DECODE: self.decode, Role.PREFILL: self.prefill}
        return {component: workload for component, workload in each.items() if workload}

    @property
    def devices(self) -> dict[str, int]:
        """Of one worker."""
        return {Role.DECODE: self.decode_devices, Role.PREFILL: self.prefill_devices}


@dataclass(frozen=True, kw_only=True)
class PlannerConfig(PlannerOptions):
    """Changes the numbers of prefill and decode workers with the load."""

    #: Whether decisions are only reported, not carried out.
    dry_run: bool = False
    #: With a workload in it Kubernetes starts and removes workers, and else the supervisor of the
    #: graph on this host.
    kubernetes: KubernetesOptions = field(default_factory=KubernetesOptions)
