"""Converts vLLM's log-probabilities to bytes and back: those of a step, and those of a prompt."""

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.generate import LogprobRows


def rows_of(lists: LogprobsLists) -> LogprobRows:
    token_ids, logprobs, ranks, *_ = lists
    rows, width = logprobs.shape
    return LogprobRows(
        rows=rows,
        width=width,
        token_ids=token_ids.astype("<i8", copy=False).tobytes(),
        logprobs=logprobs.astype("<f4", copy=False).tobytes(),
        ranks=ranks.astype("<i8", copy=False).tobytes(),
    )


def lists_of(rows: LogprobRows) -> LogprobsLists:
    """Raises ProtocolError for an inconsistent size."""
    cells = rows.rows * rows.width
    sizes = (len(rows.token_ids), len(rows.logprobs), len(rows.ranks))
    if rows.rows < 0 or rows.width < 1 or sizes != (8 * cells, 4 * cells, 8 * rows.rows):
        raise ProtocolError(f"logprobs of {rows.rows} x {rows.width} in {sizes} bytes")
    shape = (rows.rows, rows.width)
    return LogprobsLists(
        np.frombuffer(rows.token_ids, "<i8").reshape(shape),
        np.frombuffer(rows.logprobs, "<f4").reshape(shape),
        np.frombuffer(rows.ranks, "<i8"),
    )


def tensors_of(rows: LogprobRows) -> LogprobsTensors:
    """As `lists_of`."""
    # Copied: torch needs writable memory.
    ids, logprobs, ranks = (torch.from_numpy(each.copy()) for each in lists_of(rows)[:3])
    return LogprobsTensors(ids, logprobs, ranks)
