"""How many workers a load needs: a discrete-event simulation of a graph, in a heap of events.

The shipped policies decide (`policy/`); engines, queue and network are models of their times.
There are no tokens, no network and no event loop, so a run of 100,000 requests takes seconds.
"""
