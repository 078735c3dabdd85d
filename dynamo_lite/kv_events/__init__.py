"""KV routing events: workers publish the prefixes that they hold, routers follow them."""
