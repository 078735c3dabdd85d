from dynamo_lite.engine.request_ids import RequestIds


def test_an_id_that_comes_again_gets_another_name():
    ids = RequestIds()
    first = ids.enter("r#1")
    assert ids.leave(["r#1", "unknown"]) == [first]
    second = ids.enter("r#1")
    assert first != second
    assert ids.caller(first, ended=True) is None
    assert ids.caller(second, ended=False) == "r#1"
    assert ids.leave(["r#1"]) == [second]


def test_an_ended_request_is_forgotten():
    ids = RequestIds()
    own = ids.enter("r")
    assert ids.caller(own, ended=True) == "r"
    assert ids.caller(own, ended=True) is None
    assert ids.leave(["r"]) == []
