"""The options of the Planner in the YAML file. The command line reads this module."""

import re
from dataclasses import dataclass, field

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.limits import contradictions
from dynamo_lite.protocol.options import NaturalOption, PlannerOptions

#: A workload that can be scaled, by its resource and name.
WORKLOAD = re.compile(r"deployments/[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The workloads that a planner scales, and how it reaches the API server."""

    #: Workload of the decode workers, as `deployments/NAME`.
    decode: str = ""
    #: Workload of the prefill workers; empty: there are none.
    prefill: str = ""
    #: Devices of one decode worker, for the budget.
    decode_devices: NaturalOption = 1
    #: Devices of one prefill worker.
    prefill_devices: NaturalOption = 1
    #: The API server.
    url: str = "https://kubernetes.default.svc"
    #: Folder with the files `token`, `ca.crt` and `namespace` of a service account.
    service_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"

    @property
    def scales(self) -> bool:
        """Whether any workload is named."""
        return bool(self.decode or self.prefill)

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

    def __post_init__(self) -> None:
        """Raises ValueError when options contradict each other."""
        scaled = self.kubernetes.scales
        # Those of workers that a graph starts itself are not in this section.
        mistakes = contradictions(self, self.kubernetes.devices if scaled else None)
        if scaled:
            mistakes += [
                f"kubernetes.{name} is {value!r}: expected deployments/NAME"
                for name, value in (
                    ("decode", self.kubernetes.decode),
                    ("prefill", self.kubernetes.prefill or "deployments/none"),
                )
                if not WORKLOAD.fullmatch(value)
            ]
        if mistakes:
            raise ValueError("; ".join(mistakes))
