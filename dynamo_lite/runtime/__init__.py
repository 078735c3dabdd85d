"""What every process is built on: store, messaging, membership, tracing, process life cycle."""

import os

# gRPC reads these once, at its first use. Its own logging repeats what the store logs, and
# its fork handlers log a warning for every subprocess.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
