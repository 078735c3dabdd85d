"""The generate endpoint: requests over NATS, token deltas over direct TCP.

`base.py` has the interfaces, `client.py` the frontend's side, `server.py` the worker's side
and `local.py` a client within the worker's process. `failover.py` chooses among many workers
and migrates requests from a lost worker to another one.
"""
