"""The devices of one supervisor, and which of them its processes occupy."""

from collections.abc import Iterable

#: vLLM's engines see only the devices that this environment variable names.
DEVICE_VARIABLE = "CUDA_VISIBLE_DEVICES"


class Devices:
    """Bookkeeping only.

    given: names of devices for `CUDA_VISIBLE_DEVICES`, or their number: then they are only
        counted, and no variable is set.
    """

    def __init__(self, given: Iterable[str | int] | int):
        self._named = not isinstance(given, int)
        names = range(given) if isinstance(given, int) else given
        self._all = tuple(str(name) for name in names)
        self._free = list(self._all)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[str, ...] | None:
        """Occupies the first `count` free devices. Returns None, and changes nothing, when
        fewer are free."""
        if count > len(self._free):
            return None
        taken, self._free = tuple(self._free[:count]), self._free[count:]
        return taken

    def put_back(self, taken: Iterable[str]) -> None:
        free = {*self._free, *taken}
        self._free = [name for name in self._all if name in free]

    def environment(self, taken: tuple[str, ...]) -> dict[str, str]:
        """The environment variables of a process that occupies these devices."""
        return {DEVICE_VARIABLE: ",".join(taken)} if self._named and taken else {}
