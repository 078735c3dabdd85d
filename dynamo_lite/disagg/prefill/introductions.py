"""Tracks which decode engines' metadata the ranks have, so that it is sent to them once.

Metadata has an entry for every layer of every rank: it is by far the largest part of a step.
"""

from collections.abc import Callable, Iterable

from dynamo_lite.disagg.messages import PrefillStep


class Introductions:
    """own: returns the value for `PrefillStep.own`."""

    def __init__(self, own: Callable[[], bytes]):
        self._own = own
        self._sent: set[str] = set()

    def introduce(
        self, step: PrefillStep, engine_id: str, target: bytes, *, again: bool = False
    ) -> None:
        """Adds the engine's metadata to the step unless the ranks have it.

        target: the metadata in msgpack. again: add it in any case.
        """
        # Ranks apply `targets` before `forget`: an engine of this step must not be forgotten.
        step.forget = [left for left in step.forget if left != engine_id]
        if again or engine_id not in self._sent:
            self._sent.add(engine_id)
            step.targets[engine_id] = target
            step.own = self._own()

    def forget(self, engine_ids: Iterable[str]) -> None:
        """These engines have left, or a rank has reported that it does not have their metadata."""
        self._sent.difference_update(engine_ids)
