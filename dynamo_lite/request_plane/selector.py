"""Selection of a request's worker: by a picker in this process, or by a remote router."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dynamo_lite.policy.routing import Picker, Selection
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord


class WorkerSelector(ABC):
    """The asynchronous form of `Picker`. A cancelled `choose` books nothing."""

    @abstractmethod
    async def choose(
        self, members: Sequence[EndpointRecord], request: GenerateRequest
    ) -> Selection: ...

    @abstractmethod
    def answered(self, request_id: str) -> None: ...

    @abstractmethod
    def released(self, request_id: str) -> None: ...


class LocalSelector(WorkerSelector):
    def __init__(self, picker: Picker):
        self._picker = picker

    async def choose(
        self, members: Sequence[EndpointRecord], request: GenerateRequest
    ) -> Selection:
        return self._picker.pick(members, request)

    def answered(self, request_id: str) -> None:
        self._picker.answered(request_id)

    def released(self, request_id: str) -> None:
        self._picker.released(request_id)
