"""That chaos would notice: what its load makes of good and bad servers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.chaos.client import Answer
from tests.chaos.delays import Timed, frozen_facts, longest, longest_gap
from tests.chaos.load import Excuse, Load, Tally
from tests.chaos.questions import Question
from tests.chaos.report import Report

RIGHT = Answer(tokens={0: [1, 2, 3]}, finish={0: "length"}, usage=3)
STREAMED = Question("streamed", {"prompt": [5], "stream": True})
WHOLE = Question("whole", {"prompt": [5], "stream": False})

Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(data: str) -> bytes:
    return f"{len(data):x}\r\n{data}\r\n".encode()


def event(tokens: list[int], finish: str | None = None, usage: int = 0) -> bytes:
    choice = {"index": 0, "token_ids": tokens, "finish_reason": finish}
    message = {"choices": [choice], "usage": {"completion_tokens": usage} if usage else None}
    return chunk(f"data: {json.dumps(message)}\n\n")


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = chunk("data: [DONE]\n\n") + b"0\r\n\r\n"
GOOD = HEAD + event([1]) + event([2, 3], "length", 3) + DONE


def saying(*parts: bytes) -> Answering:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


async def silence(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def server(*answers: Answering) -> AsyncIterator[int]:
    """Gives each connection the next answer, the last one for ever. Yields its port."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = left.pop(0) if len(left) > 1 else left[0]
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            await answer(writer)
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


async def ask_once(
    *answers: Answering,
    question: Question = STREAMED,
    leaves_s: float | None = None,
    excuse: Excuse = lambda began, begun: "",
) -> Tally:
    async with server(*answers) as port:
        load = Load(port, [question], {question.name: RIGHT}, excuse=excuse)
        await asyncio.wait_for(load.one(question, leaves_s), 10)
        return load.tally


async def test_a_right_answer_is_right():
    tally = await ask_once(saying(GOOD))
    assert (tally.requests, tally.right, tally.open) == (1, 1, 0)
    assert tally.tokens == 3


async def test_a_whole_answer_is_right():
    body = b'{"choices": [{"index": 0, "token_ids": [1, 2, 3], "finish_reason": "length"}], '
    body += b'"usage": {"completion_tokens": 3}}'
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    assert (await ask_once(saying(head, body), question=WHOLE)).right == 1


async def test_one_other_token_is_wrong():
    tally = await ask_once(saying(HEAD + event([1, 2, 4], "length", 3) + DONE))
    assert (tally.wrong, tally.right) == (1, 0)
    assert "token 2" in tally.examples[0]


async def test_a_wrong_usage_is_wrong():
    tally = await ask_once(saying(HEAD + event([1, 2, 3], "length", 6) + DONE))
    assert tally.wrong == 1


async def test_a_token_that_comes_twice_is_wrong():
    tally = await ask_once(saying(HEAD + event([1]) + event([1, 2, 3], "length", 3) + DONE))
    assert tally.wrong == 1


async def test_a_stream_that_stops_is_lost():
    for cut in (saying(HEAD + event([1])), saying(HEAD + event([1]) + b"0\r\n\r\n"), saying(b"")):
        tally = await ask_once(cut)
        assert tally.lost == {"broken connection": 1}
        assert not tally.open


async def test_an_error_in_the_stream_is_lost():
    error = chunk('data: {"error": {"code": 503, "message": "no worker"}}\n\n')
    tally = await ask_once(saying(HEAD + event([1]) + error + DONE))
    assert tally.lost == {"event 503": 1}


async def test_an_error_status_is_lost():
    tally = await ask_once(saying(b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"))
    assert tally.lost == {"500": 1}


async def test_a_503_that_does_not_say_when_to_ask_again_is_lost():
    tally = await ask_once(saying(b"HTTP/1.1 503 Oh\r\ncontent-length: 0\r\n\r\n"))
    assert tally.lost == {"503": 1}


async def test_what_is_refused_is_asked_again():
    busy = b"HTTP/1.1 429 Oh\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n"
    tally = await ask_once(saying(busy), saying(busy), saying(GOOD))
    assert (tally.requests, tally.right) == (1, 1)
    assert tally.refused == {"429": 2}
    assert not tally.lost


async def test_what_is_excused_is_asked_again():
    tally = await ask_once(
        saying(HEAD + event([1])), saying(GOOD), excuse=lambda began, begun: "Frontend killed"
    )
    assert tally.excused == {"Frontend killed": 1}
    assert (tally.right, tally.lost.total()) == (1, 0)


async def test_a_client_that_leaves_is_counted_as_such():
    tally = await ask_once(silence, leaves_s=0.05)
    assert (tally.cancelled, tally.open) == (1, 0)


async def test_a_gap_within_a_stream_is_seen():
    pause = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await saying(HEAD + event([1]))(writer)
        # Longer than the gap that is asserted: the client may read the first event late.
        asyncio.get_running_loop().call_later(0.5, pause.set)
        await pause.wait()
        await saying(event([2, 3], "length", 3) + DONE)(writer)

    tally = await ask_once(answer)
    assert tally.right == 1 and 0.2 <= tally.between_tokens.seconds < 5.0


def test_all_three_delays_of_a_frozen_broker_are_in_the_result():
    streams = [Timed("a", 0.0, 14.0, (0.5, 2.0, 9.0, 14.0)), Timed("b", 8.0, 13.0, (12.0, 12.5))]
    facts = frozen_facts(streams, 0.0, 7.0, 14.0)
    assert facts == {
        "longest gap in a stream": "7.00 s; before 7.00 s; aim: at most 1 s: MISSED",
        "longest time without any token": "7.00 s; before 7.00 s; aim: at most 1 s: MISSED",
        "longest wait for a first token": "4.00 s; before 0.50 s",
    }
    report = Report("nats-frozen", 1, facts=facts)
    shown = report.as_text()
    assert all(name in shown and text in shown for name, text in facts.items())
    assert report.as_json()["facts"] == facts


def test_the_longest_gap_is_the_longest_that_overlaps_the_time():
    arrivals = (9.0, 1.0, 2.0, 5.0)
    assert longest_gap(arrivals, 0.0, 10.0) == 4.0
    assert longest_gap(arrivals, 1.5, 3.0) == 3.0
    assert longest_gap(arrivals, 2.0, 2.0) == 0.0
    assert longest_gap(arrivals, 20.0, 30.0) == 0.0
    assert longest_gap((), 0.0, 10.0) == 0.0


def test_the_longest_answer_is_that_from_question_to_end():
    slow, quick = Timed("slow", 1.0, 4.0), Timed("quick", 5.0, 6.0)
    assert longest([quick, slow]) is slow and slow.seconds == 3.0
