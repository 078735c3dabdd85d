"""Which decode engines the ranks know: each one's metadata travels to them once.

It has an entry for every layer of every rank, so it is larger than all else in a step.
"""

from collections.abc import Callable, Iterable

from dynamo_lite.disagg.messages import PrefillStep


class Introductions:
    """own: see `PrefillStep.own`."""

    def __init__(self, own: Callable[[], bytes]):
        self._own = own
        self._told: set[str] = set()

    def introduce(
        self, step: PrefillStep, engine_id: str, target: bytes, *, again: bool = False
    ) -> None:
        """The step needs the engine. target: its metadata (msgpack). again: whether the ranks
        get it although they were told."""
        # The ranks take what a step says of an engine before they forget any.
        step.forget = [left for left in step.forget if left != engine_id]
        if again or engine_id not in self._told:
            self._told.add(engine_id)
            step.targets[engine_id] = target
            step.own = self._own()

    def forget(self, engine_ids: Iterable[str]) -> None:
        """They have left, or a rank has said that it does not know them."""
        self._told.difference_update(engine_ids)
