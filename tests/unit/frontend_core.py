"""What the tests of a Frontend's two engine cores share: a failover client that records its calls,
and the other parts that a core is opened over."""

from collections import Counter
from collections.abc import Sequence
from typing import cast

from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.options import AdmissionOptions
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.admission import Admission
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.runtime.tracing import Tracer
from dynamo_lite.vllm.frontend.intake import Intake
from tests.builders import endpoint_record


class RecordingFailover:
    """refusal: what `submit` raises, unless it is None."""

    def __init__(self) -> None:
        self.members: list[EndpointRecord] = [endpoint_record()]
        self.submitted: list[GenerateRequest] = []
        self.plans: list[MigrationPlan] = []
        self.aborted: list[str] = []
        self.refusal: Exception | None = None

    @property
    def submitted_ids(self) -> list[str]:
        return [message.request_id for message in self.submitted]

    async def submit(self, message: GenerateRequest, movable: MigrationPlan) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(message)
        self.plans.append(movable)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids


class CoreScene:
    """One worker, and admission for `in_flight` requests."""

    def __init__(self, in_flight: int, tracer: Tracer | None = None) -> None:
        self.failover = RecordingFailover()
        limits = AdmissionOptions(max_in_flight_requests=in_flight, max_queued_tokens=10**6)
        self.admission = Admission(limits)
        self.refused: Counter[str] = Counter()
        self.intake = Intake(
            cast("FailoverClient", self.failover),
            admission=self.admission,
            refused=self.refused,
            tracer=tracer,
        )
