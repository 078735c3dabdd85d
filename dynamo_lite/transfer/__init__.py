"""Moves KV blocks between engines: layouts, the mover, the metadata directory."""
