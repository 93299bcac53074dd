"""The gRPC door: Triton's service and gRPC's health service, in a process of its own."""

import os

# gRPC writes past our log, and a line for every client that cannot do TLS is too much.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
