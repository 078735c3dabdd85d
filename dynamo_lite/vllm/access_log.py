"""What the access log of the HTTP server leaves out."""

import logging

#: Of a path and query.
_LOGGED_CHARS = 1024


class QuietPaths(logging.Filter):
    """For the logger `uvicorn.access`: the third argument of its records is the path and query,
    which is cut if it is long."""

    def __init__(self, paths: frozenset[str]):
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        if not isinstance(args, tuple) or len(args) <= 2:
            return True
        path = str(args[2])
        # A stranger's may have 64 KiB.
        record.args = (*args[:2], path[:_LOGGED_CHARS], *args[3:])
        return path.partition("?")[0] not in self._paths
