"""Listeners: each is called, in order, until it is removed."""

import pytest

from dynamo_lite.runtime.listeners import Listeners


def test_listeners_are_called_in_order_until_their_context_is_left():
    listeners = Listeners[int, str]("the store")
    heard: list[tuple[str, int, str]] = []
    listeners.add(lambda number, text: heard.append(("first", number, text)))
    added = listeners.add(lambda number, text: heard.append(("second", number, text)))
    listeners.notify(1, "a")
    assert heard == [("first", 1, "a"), ("second", 1, "a")]
    with added:
        listeners.notify(2, "b")
    listeners.notify(3, "c")
    assert heard[2:] == [("first", 2, "b"), ("second", 2, "b"), ("first", 3, "c")]


def test_a_failing_listener_is_logged_and_all_others_are_called(
    caplog: pytest.LogCaptureFixture,
):
    def fails(number: int) -> None:
        raise ValueError(f"cannot take {number}")

    listeners = Listeners[int]("the store")
    heard: list[int] = []
    listeners.add(fails)
    listeners.add(heard.append)
    listeners.notify(1)
    assert heard == [1]
    (logged,) = caplog.records
    assert logged.getMessage() == "a listener of the store failed"
    assert "cannot take 1" in caplog.text


def test_a_listener_may_be_added_or_removed_by_another_one():
    listeners = Listeners[[]]("the store")
    heard: list[str] = []
    leaving = listeners.add(lambda: heard.append("leaving"))

    def changes() -> None:
        listeners.add(lambda: heard.append("new"))
        with leaving:
            pass

    with listeners.add(changes):
        listeners.notify()
    assert heard == ["leaving"]
    listeners.notify()
    assert heard == ["leaving", "new"]
