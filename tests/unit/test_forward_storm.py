"""The order in which the storm of a Forwarder kills."""

from tests.chaos.forward_storm import KILLS, Kill, Turns
from tests.vllm.stock import Role

ROLES: tuple[Role, ...] = ("prefill", "decode")


def names(role: Role) -> list[str]:
    return [kill.name for kill in KILLS if kill.role == role]


def due(turns: Turns, role: Role) -> Kill:
    kill = turns.next(role)
    assert kill is not None
    return kill


def done(turns: Turns, role: Role) -> str:
    kill = due(turns, role)
    turns.counts[kill.name] += 1
    return kill.name


def test_each_role_goes_through_its_kills_in_order():
    turns = Turns()
    for role in ROLES:
        assert [done(turns, role) for _ in names(role)] == names(role)
    assert set(turns.counts.values()) == {1}


def test_a_role_that_is_through_waits_until_the_other_one_is():
    turns = Turns()
    for _ in names("decode"):
        done(turns, "decode")
    assert turns.next("decode") is None
    for _ in names("prefill"):
        assert turns.next("decode") is None
        done(turns, "prefill")
    assert done(turns, "decode") == names("decode")[0]


def test_a_missed_kill_is_tried_again_after_the_others_and_before_the_next_round():
    turns = Turns()
    turns.missed(due(turns, "prefill"))
    first, *others = names("prefill")
    assert [done(turns, "prefill") for _ in names("prefill")] == [*others, first]


def test_a_moment_that_never_comes_does_not_hold_up_the_others():
    turns = Turns()
    never, *others = names("prefill")
    found: list[str] = []
    for _ in range(3 * len(others)):
        kill = due(turns, "prefill")
        if kill.name == never:
            turns.missed(kill)
        else:
            found.append(done(turns, "prefill"))
    assert found == others


def test_every_kill_of_the_role_of_the_documentation_is_planned():
    moments = {(kill.role, kill.moment) for kill in KILLS if not (kill.core or kill.all)}
    assert moments == {
        *(("prefill", moment) for moment in ("begins", "runs", "ends")),
        *(("decode", moment) for moment in ("begins", "runs")),
    }
