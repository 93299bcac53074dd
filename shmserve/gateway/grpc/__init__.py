"""The gRPC listener: Triton's service and gRPC's health service, in a process of its own.

    main.py      the server (settings.py); loop.py is the event loop under it
    service.py   the table of RPCs: authorise, handle, errors to a status
    unary.py     calls of ModelInfer, without a task; calls.py: all that are in progress
    infer.py     a request to its scheduler and back; stream.py: many in one call
                 plans.py, codec.py: bytes to a request; responses.py: an answer to bytes
    control.py, memory.py, log_and_trace.py      the other RPCs
    callers.py, sockets.py, crowds.py            who is connected, and who makes room

What both listeners share is in shmserve/gateway.
"""

import os

# gRPC writes past our log, and a line for every client that cannot do TLS is too much.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
