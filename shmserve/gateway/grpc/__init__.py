"""The gRPC door: Triton's service and gRPC's health service, in a process of its own."""

import os

# gRPC writes past our log, and a line for every client that cannot do TLS is too much.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# By default gRPC reads its sockets in threads of its own, and these wake the thread that waits for
# events, which wakes the loop. Here that thread reads them itself: one switch less a message.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
