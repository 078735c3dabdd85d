"""The Frontend's page `/dashboard`: the running graph, live."""
