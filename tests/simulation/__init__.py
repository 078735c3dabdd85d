"""Simulated processes on one event loop in virtual time: same seed, same run, bit for bit.

No module here opens a socket, starts a thread, or reads a real clock or random source.
"""
