import pytest

from dynamo_lite.disagg.decode.decision_log import is_of
from dynamo_lite.disagg.request_ids import RequestIds


def test_an_id_that_comes_again_gets_another_name():
    ids = RequestIds()
    first = ids.enter("r#1")
    assert ids.leave(["r#1", "unknown"]) == [first]
    second = ids.enter("r#1")
    assert first != second
    assert ids.running(first) is None
    assert ids.running(second) == "r#1"
    assert ids.leave(["r#1"]) == [second]


def test_an_ended_request_is_forgotten():
    ids = RequestIds()
    own = ids.enter("r")
    assert ids.running(own) == "r"
    assert ids.leave(["r"]) == [own]
    assert ids.running(own) is None and ids.leave(["r"]) == []


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        ("r1#1", "r1", True),
        ("r1#1", "r1#1", True),
        ("chatcmpl-9f-0a1b2c3d#7", "chatcmpl-9f", True),
        ("chatcmpl-9f-0a1b2c3d#7", "chatcmpl-9f-0a1b2c3d", True),
        ("3_chatcmpl-9f-0a1b2c3d#7", "chatcmpl-9f", True),
        ("3_chatcmpl-9f-0a1b2c3d#7", "3_chatcmpl-9f-0a1b2c3d", True),
        ("cmpl-9f-1-0a1b2c3d#7", "cmpl-9f", True),
        ("12_cmpl-9f-1-0a1b2c3d~2#7", "cmpl-9f", True),
        ("cmpl-9f-1-0a1b2c3d~2#7", "cmpl-9f-1-0a1b2c3d~2", True),
        # By the client's X-Request-Id, to which the route has added.
        ("cmpl-9f-1-0a1b2c3d#7", "9f", True),
        ("3_chatcmpl-9f-0a1b2c3d~2#7", "9f", True),
        ("cmpl-x-cmpl-9f-0a1b2c3d#7", "9f", False),
        ("cmpl-x1_9f-0a1b2c3d#7", "x9f", False),
        ("cmpl-9f-1-0a1b2c3d#7", "cmpl-9f-0", False),
        ("cmpl-9f-1-0a1b2c3d#7", "cmpl-9", False),
        ("cmpl-9f-more-0a1b2c3d#7", "cmpl-9f", False),
        ("cmpl-9f-0a1b2c3d#7", "pl-9f", False),
        ("cmpl-9f-0a1b2c3d#7", "7", False),
        ("1_a-0a1b2c3d#1", "1_a", True),
        ("a.c#1", "abc", False),
        ("abc#1", "a.c", False),
    ],
)
def test_a_clients_id_finds_its_request_and_no_other(own: str, asked: str, expected: bool):
    assert is_of(own, asked) is expected
