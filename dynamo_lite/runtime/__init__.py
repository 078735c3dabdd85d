"""What every process runs on: store, messaging, token streams, and the host that ties them."""

import os

# gRPC reads these once, when it is first used. Its own logging repeats what the store
# reports, and its fork handlers would complain about every subprocess.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
