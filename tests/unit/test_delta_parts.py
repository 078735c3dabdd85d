"""Rows of log-probabilities that come in parts."""

import msgspec

from dynamo_lite.protocol.generate import LogprobRows, TokenDelta
from dynamo_lite.request_plane.migrating_request import MigratingRequest, MigrationPlan
from tests.builders import endpoint_record, generate_request


def rows_of(rows: int, width: int, seed: int) -> LogprobRows:
    def part(size: int) -> bytes:
        return bytes((seed + 7 * i) % 251 for i in range(size))

    cells = rows * width
    return LogprobRows(rows, width, part(8 * cells), part(4 * cells), part(8 * rows))


def joined(parts: list[LogprobRows | None]) -> LogprobRows | None:
    there = [part for part in parts if part is not None]
    if not there:
        return None
    return LogprobRows(
        sum(part.rows for part in there),
        there[0].width,
        b"".join(part.token_ids for part in there),
        b"".join(part.logprobs for part in there),
        b"".join(part.ranks for part in there),
    )


def test_rows_that_a_lost_worker_has_sent_are_not_sent_on_again():
    whole = rows_of(8, 3, 5)
    request = generate_request("a", prompt_token_ids=[1])
    flight = MigratingRequest(request, MigrationPlan(), None)

    def take(start: int, stop: int, *tokens: int) -> TokenDelta | None:
        rows = whole.part(start, stop)
        return flight.take(TokenDelta(request_id="a", token_ids=list(tokens), prompt_logprobs=rows))

    flight.attempt("a", endpoint_record(), 0.0)
    sent = [take(0, 3)]
    flight.moves += 1
    flight.attempt("a", endpoint_record(), 0.0)
    assert take(0, 2) is None
    sent += [take(2, 6), take(6, 8, 1)]
    assert joined([part.prompt_logprobs for part in sent if part is not None]) == whole
    assert msgspec.structs.asdict(sent[-1])["token_ids"] == [1]
