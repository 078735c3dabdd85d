"""Measurements of the running system; each module is a command of its own."""
