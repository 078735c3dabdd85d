"""Which subscriptions of a simulated NATS server a subject reaches."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Subjects(Generic[T]):
    """Subscribers by subject; `*` stands for one token, a last `>` for one or more.

    Subscribers of one pattern come in the order in which they were added. Those with a
    wildcard are kept by the tokens before it, so that a lookup costs a few dict reads.
    """

    def __init__(self) -> None:
        self._exact: dict[str, dict[T, None]] = {}
        self._wild: dict[str, dict[T, list[str]]] = {}

    def add(self, pattern: str, subscriber: T) -> None:
        before, tokens = _split(pattern)
        if tokens:
            self._wild.setdefault(before, {})[subscriber] = tokens
        else:
            self._exact.setdefault(pattern, {})[subscriber] = None

    def remove(self, pattern: str, subscriber: T) -> None:
        before, tokens = _split(pattern)
        table, key = (self._wild, before) if tokens else (self._exact, pattern)
        subscribers = table.get(key)
        if subscribers is not None:
            subscribers.pop(subscriber, None)
            if not subscribers:
                del table[key]

    def matching(self, subject: str) -> list[T]:
        found = list(self._exact.get(subject, ()))
        wild = self._wild
        at = 0 if wild else -1
        while at >= 0:
            if (subscribers := wild.get(subject[:at])) is not None:
                rest = subject[at:]
                found += [one for one, pattern in subscribers.items() if _matches(pattern, rest)]
            at = subject.find(".", at) + 1 or -1
        return found


def _split(pattern: str) -> tuple[str, list[str]]:
    """What stands before the first wildcard, and the tokens from there on."""
    tokens = pattern.split(".")
    for i, token in enumerate(tokens):
        if token in ("*", ">"):
            return "".join(f"{token}." for token in tokens[:i]), tokens[i:]
    return pattern, []


def _matches(pattern: list[str], rest: str) -> bool:
    if len(pattern) == 1:  # as those of inboxes
        return pattern[0] == ">" or "." not in rest
    tokens = rest.split(".")
    if pattern[-1] == ">":
        pattern = pattern[:-1]
        if len(tokens) <= len(pattern):
            return False
    elif len(tokens) != len(pattern):
        return False
    return all(want in ("*", token) for want, token in zip(pattern, tokens, strict=False))
