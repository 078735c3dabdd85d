"""Forwarding: an HTTP server in front of stock engines."""

from dynamo_lite.serve.services.services import FORWARDER, Graph

Forwarder = Graph(services=(FORWARDER,))
