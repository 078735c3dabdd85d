"""Says on a machine with a GPU whether what only a GPU can show works there.

`scripts/gpu_check` is its command.
"""
