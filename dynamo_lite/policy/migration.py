"""How a request goes on when its worker is lost after it has given tokens.

Exact means: the client's tokens are those that one worker would have given. A
new worker that is given the tokens so far computes the same next ones only where
they depend on nothing but the token ids. What a sampler keeps besides (a random
generator's state, counts over the output, a grammar's state) is rebuilt by
running the same request from its start and comparing what was sent already.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingFacts:
    """What matters of a request's sampling parameters.

    greedy: the most probable token is taken. seeded: random, from a generator
    whose seed the request names. history_dependent: the choice depends on which
    tokens were generated, beyond their being the context (presence, frequency or
    repetition penalty, bad words, detection of repetitions). grammar: the output
    is constrained by one. causal: no token of the model's context attends to a later
    one; if not, tokens mean something else at the end of a prompt than as an output.
    """

    greedy: bool = False
    seeded: bool = False
    history_dependent: bool = False
    grammar: bool = False
    causal: bool = True


@dataclass(frozen=True, kw_only=True)
class Continue:
    """Sent again with the tokens so far."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Sent again as it was; the tokens sent already are compared and swallowed."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Stay:
    """Cannot go on elsewhere once a token was sent."""

    reason: str


Plan = Continue | Replay | Stay


def plan(facts: SamplingFacts) -> Plan:
    if facts.greedy:
        if facts.grammar:
            return Replay(reason="greedy under a grammar: repeated exactly")
        if facts.history_dependent:
            return Replay(reason="greedy with a memory of its output: repeated exactly")
        if not facts.causal:
            return Replay(reason="greedy, and the model is not causal: repeated exactly")
        return Continue(reason="greedy: the next token depends on the tokens so far only")
    if facts.seeded:
        return Replay(reason="seeded: the random generator is brought to the same state")
    if facts.grammar:
        return Stay(reason="random without a seed under a grammar, whose state cannot be moved")
    if not facts.causal:
        return Stay(reason="random without a seed, and the model is not causal")
    return Continue(reason="random without a seed: any continuation is as good")
