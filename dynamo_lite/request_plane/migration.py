"""How a request continues after its worker is lost in the middle of the answer.

Exact means: the client gets the tokens that one worker would have produced. A new worker that gets
the tokens so far computes the same next ones only if they depend on nothing but the token ids.
Other sampler state (a random generator, counts over the output, a grammar) is rebuilt by running
the same request from its start and comparing the tokens that were sent already.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingFacts:
    """The sampling parameters that decide how a request can migrate."""

    #: The most probable token is taken.
    greedy: bool = False
    #: Random, from a generator whose seed is in the request.
    seeded: bool = False
    #: The choice depends on the generated tokens beyond their being the context (presence,
    #: frequency or repetition penalty, bad words, detection of repetitions).
    history_dependent: bool = False
    #: A grammar constrains the output.
    grammar: bool = False
    #: No token of the model's context attends to a later one. Otherwise tokens have another effect
    #: at the end of a prompt than as output.
    causal: bool = True


@dataclass(frozen=True, kw_only=True)
class Continue:
    """Send it with the tokens so far."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Send it again from its start; tokens that the client has are compared and dropped."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Stay:
    """It cannot migrate once a token was sent."""

    reason: str


MigrationPlan = Continue | Replay | Stay


def plan(facts: SamplingFacts) -> MigrationPlan:
    if facts.greedy:
        if facts.grammar:
            return Replay(reason="greedy under a grammar: repeated exactly")
        if facts.history_dependent:
            return Replay(reason="greedy, but dependent on its output: repeated exactly")
        if not facts.causal:
            return Replay(reason="greedy, and the model is not causal: repeated exactly")
        return Continue(reason="greedy: the next token depends on the tokens so far only")
    if facts.seeded:
        return Replay(reason="seeded: the random generator is brought to the same state")
    if facts.grammar:
        return Stay(reason="random without a seed under a grammar, whose state cannot migrate")
    if not facts.causal:
        return Stay(reason="random without a seed, and the model is not causal")
    return Continue(reason="random without a seed: any continuation is as good")
