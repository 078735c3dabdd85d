"""What groups of similar decisions between local and remote prefill have cost all requests.

A single reversed decision says little: it also changes the order of jobs, and that moves many other
requests by chance. Here a random part of a group is reversed at a time, in the same load with all
other decisions as they were. What the part is worth adds up, and what comes by chance does not.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_lite.capacity.regret import Play, reversed_for, waiting_s
from dynamo_lite.policy.decision.cost_policy import Side
from dynamo_lite.protocol.options import PrefillPolicy

#: Upper bounds of the groups, in prompt tokens.
_LENGTHS = (512, 2048, 8192, math.inf)


@dataclass(frozen=True, order=True)
class Group:
    """Decisions for the same side. tokens: upper bound of the prompts' lengths. crowded: there
    was at least one job per prefill worker."""

    side: Side
    tokens: float
    crowded: bool


@dataclass(frozen=True)
class GroupGains:
    """Of one group. gains_s: seconds of waiting that the other side would have saved per decision,
    below 0 where it would have cost more; one of each part, empty where the group is smaller than
    the number of parts."""

    group: Group
    decisions: int
    gains_s: tuple[float, ...]


def group_gains(play: Play, policy: PrefillPolicy, parts: int, seed: int = 0) -> list[GroupGains]:
    """parts: into how many each group is divided at random. Each part is reversed in one run."""
    result = play.run(policy)
    choices, cost_s = result.graph.tally.choices, waiting_s(result, play.timing)
    taken, rng = dict(choices.taken), random.Random(seed)
    groups: defaultdict[Group, list[str]] = defaultdict(list)
    for name, side in taken.items():
        groups[Group(side, _most(play, name), name in choices.crowded)].append(name)

    def gain_s(names: list[str]) -> float:
        again = play.run("thresholds", reversed_for(taken, names))
        return (cost_s - waiting_s(again, play.timing)) / len(names)

    found: list[GroupGains] = []
    for group, names in sorted(groups.items()):
        rng.shuffle(names)
        gains_s = tuple(map(gain_s, _divided(names, parts))) if len(names) >= parts else ()
        found.append(GroupGains(group, len(names), gains_s))
    return found


def _most(play: Play, name: str) -> float:
    tokens = play.requests[int(name)].prompt_tokens
    return next(most for most in _LENGTHS if tokens <= most)


def _divided(names: list[str], parts: int) -> Iterator[list[str]]:
    for part in range(parts):
        yield names[part::parts]
