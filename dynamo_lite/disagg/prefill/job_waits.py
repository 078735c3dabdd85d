"""How long a prefill worker waits with its jobs: for decode engines, for the broker, for others."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JobWaits:
    """In seconds."""

    #: Timeout of one try to claim; see `ask_claim`. With three tries, about the time after which an
    #: engine counts as unresponsive.
    claim_s: float = 2.0
    #: How long the report of an outcome waits for the broker.
    report_s: float = 5.0
    #: Delay before a job that could not be claimed is delivered again; doubles up to the limit.
    retry_delay_s: float = 0.5
    longest_retry_delay_s: float = 4.0
    #: Delay before a job that was left to other workers is delivered again. The first time there is
    #: no delay, because other workers may be waiting for a job. If this worker gets it again, no
    #: other one was waiting.
    left_delay_s: float = 0.25
    #: Until the broker is asked for a job again after it could not be reached.
    broker_pause_s: float = 0.2

    def before_retry_s(self, deliveries: int) -> float:
        """Delay before the next delivery, after this many."""
        return min(self.retry_delay_s * 2 ** min(deliveries - 1, 16), self.longest_retry_delay_s)


USUAL_WAITS = JobWaits()
