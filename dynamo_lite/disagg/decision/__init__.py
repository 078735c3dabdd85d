"""Where a prompt is computed, and which jobs go first. Pure."""
