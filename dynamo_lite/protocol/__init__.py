"""Messages, records, names and errors: everything that two processes must agree on."""
