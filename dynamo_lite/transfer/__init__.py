"""Moves KV blocks between engines: layouts and the mover."""
