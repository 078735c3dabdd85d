"""Moving KV blocks between engines: layouts, the mover, the metadata directory."""
