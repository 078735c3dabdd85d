"""Pure decisions: no I/O, no clock, no random source; `now` and `rng` are arguments."""
