"""Checks on a machine with a GPU what can only be tested there; run by `scripts/gpu_check`."""
