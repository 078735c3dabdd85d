"""What a mutant is: the shipped parts without one safety, and the violation that this causes."""

from dataclasses import dataclass

from tests.simulation.shipped import Shipped


@dataclass(frozen=True)
class Mutant:
    """One safety is missing."""

    parts: type[Shipped]
    #: In the text of the violation that it causes: the safety keeps this invariant.
    violates: str
