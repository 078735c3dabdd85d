"""Makes the grants of a decode engine, and leaves them for its ranks."""

from collections.abc import Callable

from dynamo_lite.disagg.attempts.attempt import Refusal
from dynamo_lite.disagg.decode.shared_state import LockedLedger
from dynamo_lite.protocol.grant import Grant
from dynamo_lite.protocol.prefill import Claim

#: Longest validity of a grant, in seconds. Attempts end within seconds or minutes.
_LONGEST_S = 86400.0


class Granting:
    """Runs on the bridge's thread. new_grant: returns a new grant's id, above 0."""

    def __init__(
        self,
        book: LockedLedger,
        engine_id: str,
        new_grant: Callable[[], int],
    ):
        self._book, self._engine_id, self._new_grant = book, engine_id, new_grant

    def answer(self, claim: Claim, now: float) -> Grant | Refusal:
        """A claim that is asked again, because its answer got lost, gets the same grant again."""
        writer = claim.writer_lease_id
        with self._book.lock:
            ledger = self._book.ledger
            refusal = ledger.claim(claim.attempt, writer, now, claim.number, self._new_grant())
            if refusal is not None:
                return refusal
            terms = ledger.granted(claim.attempt, now)
            # Done before the writer gets its grant, so that the ranks learn the grant before the
            # first commit, or in the step after it.
            self._book.leave_grant(claim.attempt, terms.grant)
        return Grant(
            id=terms.grant,
            engine_id=self._engine_id,
            attempt=claim.attempt,
            writer_lease_id=writer,
            claim=claim.number,
            blocks=terms.blocks,
            for_s=min(terms.for_s, _LONGEST_S),
        )
