"""Limits on the requests in flight at one place.

Owns the counts that the limits are about. The caller reports when a request arrives, has its first
token, and ends.
"""

from dynamo_lite.protocol.options import AdmissionOptions

#: Of prompts' media and embeddings, in total, of requests in flight: they stay in memory for a
#: migration. A single larger one is admitted while there is no other one.
MAX_HELD_BYTES = 1 << 30


class Admission:
    """All methods but `enter` ignore unknown keys. limits: None for `MAX_HELD_BYTES` only."""

    def __init__(self, limits: AdmissionOptions | None = None):
        self._limits = limits
        #: By key: tokens of its prompt until its first token, and bytes of its inputs.
        self._requests: dict[str, tuple[int, int]] = {}
        #: Sums of these.
        self._waiting_tokens = self._held_bytes = 0

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return self._waiting_tokens

    def limit(self, limits: AdmissionOptions) -> None:
        """Sets new limits. Requests in flight beyond them stay."""
        self._limits = limits

    def enter(
        self, key: str, prompt_tokens: int, *, input_bytes: int = 0, promised: bool = False
    ) -> str | None:
        """Admits `key`, which must not be in flight. Or returns why not; then nothing was counted.

        input_bytes: of the prompt's media or embeddings. promised: another process has admitted it
        already, so it is counted and never refused.
        """
        if not promised and (busy := self.busy(prompt_tokens)) is not None:
            return busy
        held = self._held_bytes
        if input_bytes and not promised and held and held + input_bytes > MAX_HELD_BYTES:
            return f"media of {held} of at most {MAX_HELD_BYTES} bytes are in flight"
        self._requests[key] = prompt_tokens, input_bytes
        self._waiting_tokens += prompt_tokens
        self._held_bytes += input_bytes
        return None

    def busy(self, prompt_tokens: int = 0, *, requests: int = 1) -> str | None:
        """Which limit `requests` new requests with `prompt_tokens` in total would exceed. While no
        prompt waits, one of any length is admitted."""
        if self._limits is None:
            return None
        most, limit = self._limits.max_in_flight_requests, self._limits.max_queued_tokens
        if self.in_flight + requests > most:
            return f"{self.in_flight} of at most {most} requests are in flight"
        if self._waiting_tokens and self._waiting_tokens + prompt_tokens > limit:
            return f"{self._waiting_tokens} of at most {limit} prompt tokens wait"
        return None

    def answered(self, key: str) -> None:
        """The request's first token has arrived."""
        if (request := self._requests.get(key)) is not None:
            self._waiting_tokens -= request[0]
            self._requests[key] = 0, request[1]

    def leave(self, key: str) -> None:
        """The request has ended."""
        self.answered(key)
        self._held_bytes -= self._requests.pop(key, (0, 0))[1]
