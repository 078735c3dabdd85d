"""Graphs for `dynamo-lite serve graphs.NAME:Frontend`."""
