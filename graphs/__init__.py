"""Graphs that `dynamo-lite serve graphs.NAME:Frontend` starts."""
