"""The generate endpoint: requests and token deltas over direct TCP connections.

`base.py` has the interfaces, `client.py` the frontend's side and `server.py` the worker's side; who
may connect is decided by `dialing.py` and `listener.py`. `rotation.py` says which workers get
requests. `failover.py` chooses among them and migrates requests from a lost worker to another one.
"""
