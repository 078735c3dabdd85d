"""A running graph as an observer sees it, for `dynamo-lite top`, `ps` and `/dashboard`."""
