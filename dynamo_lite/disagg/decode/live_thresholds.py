"""The thresholds of a decode engine: from its link, and what was changed since."""

from dataclasses import dataclass
from typing import TypeVar

from msgspec import UNSET, UnsetType

from dynamo_lite.disagg.engine_config import DecodeEngineConfig
from dynamo_lite.policy import disagg, single_flight
from dynamo_lite.protocol.live_options import VllmWorkerLiveOptions
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.store import Store

T = TypeVar("T")


@dataclass(frozen=True)
class EffectiveThresholds:
    """What holds at one moment. version: of the record that says so; 0: the link alone."""

    version: int
    disagg: disagg.Thresholds
    single_flight: single_flight.SingleFlightThresholds
    remote_prefill_timeout_s: float
    max_remote_prefills: int


class LiveThresholds:
    """now: replaced as a whole, by the bridge's thread; a decision reads it once."""

    def __init__(self, role: DecodeEngineConfig, block_size: int):
        self._role, self._block_size = role, block_size
        self.now = self._tuned(VllmWorkerLiveOptions(), 0)

    def follow(
        self, store: Store, namespace: str, on_drop: OnDrop
    ) -> LiveOptions[VllmWorkerLiveOptions]:
        """A context: while it lasts, `now` is what the store says."""
        return LiveOptions(
            store,
            namespace,
            self._role.component,
            VllmWorkerLiveOptions(),
            on_change=self.change,
            on_drop=on_drop,
        )

    def change(self, options: VllmWorkerLiveOptions, version: int) -> None:
        self.now = self._tuned(options, version)

    def _tuned(self, options: VllmWorkerLiveOptions, version: int) -> EffectiveThresholds:
        role = self._role
        max_local = _or(options.max_local_prefill_length, role.max_local_prefill_length_tokens)
        shared = _or(options.single_flight_min_length, role.single_flight_min_length_tokens)
        if shared is None:  # what is worth a remote prefill is worth a wait for one
            shared = max_local // self._block_size * self._block_size
        return EffectiveThresholds(
            version=version,
            disagg=disagg.Thresholds(
                max_local_prefill_length_tokens=max_local,
                max_prefill_queue_size=_or(
                    options.max_prefill_queue_size, role.max_prefill_queue_size
                ),
                max_prefill_queue_tokens=_or(
                    options.max_prefill_queue_tokens, role.max_prefill_queue_tokens
                ),
                queue_view_max_age_s=_or(options.queue_view_max_age_s, role.queue_view_max_age_s),
            ),
            single_flight=single_flight.SingleFlightThresholds(shared),
            remote_prefill_timeout_s=_or(
                options.remote_prefill_timeout_s, role.remote_prefill_timeout_s
            ),
            max_remote_prefills=_or(options.max_remote_prefills, role.max_remote_prefills),
        )


def _or(changed: T | UnsetType, default: T) -> T:
    return default if changed is UNSET else changed
