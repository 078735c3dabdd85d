"""Deltas that are larger than a frame: their parts together contain everything once."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.protocol.generate import LogprobRows, PrefillCounts, TokenDelta, halves
from dynamo_lite.request_plane.migrating_request import MigratingRequest, MigrationPlan
from tests.builders import endpoint_record, generate_request


def rows_of(rows: int, width: int, seed: int) -> LogprobRows:
    def part(size: int) -> bytes:
        return bytes((seed + 7 * i) % 251 for i in range(size))

    cells = rows * width
    return LogprobRows(rows, width, part(8 * cells), part(4 * cells), part(8 * rows))


@st.composite
def deltas(draw: st.DrawFn) -> TokenDelta:
    tokens = draw(st.lists(st.integers(0, 100), max_size=5))
    has_logprobs = bool(tokens) and draw(st.booleans())
    prompt_rows = draw(st.integers(0, 9))
    return TokenDelta(
        request_id="a",
        token_ids=tokens,
        finish_reason=draw(st.sampled_from([None, "stop"])),
        stop_reason=draw(st.sampled_from([None, 3])),
        prefill=draw(st.sampled_from([None, PrefillCounts(9, 0, 0)])),
        logprobs=rows_of(len(tokens), 2, 1) if has_logprobs else None,
        prompt_logprobs=rows_of(prompt_rows, 3, 2) if prompt_rows else None,
    )


def atoms(delta: TokenDelta) -> list[TokenDelta]:
    pair = halves(delta)
    return [delta] if pair is None else [*atoms(pair[0]), *atoms(pair[1])]


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


@given(deltas())
def test_the_parts_together_are_the_whole(delta: TokenDelta):
    parts = atoms(delta)
    assert [token for part in parts for token in part.token_ids] == delta.token_ids
    assert joined([part.logprobs for part in parts]) == delta.logprobs
    assert joined([part.prompt_logprobs for part in parts]) == delta.prompt_logprobs
    assert parts[-1].finish_reason == delta.finish_reason
    assert parts[-1].stop_reason == delta.stop_reason
    assert all(part.finish_reason is None for part in parts[:-1])
    assert [part.prefill for part in parts if part.prefill is not None] == (
        [delta.prefill] if delta.prefill is not None else []
    )
    for part in parts:
        has_prompt = part.prompt_logprobs is not None
        assert not (has_prompt and part.prompt_logprobs.rows > 1)
        assert part.logprobs is None or part.logprobs.rows == len(part.token_ids) == 1
        assert not (has_prompt and part.logprobs is not None)


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
