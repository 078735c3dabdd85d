"""Which worker takes a request, how many it takes, and where a request goes on. Pure."""
