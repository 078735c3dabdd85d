"""The attempts of a decode engine, from the queue to the end of quarantine. Pure."""
