"""The gRPC listener: Triton's service and gRPC's health service, in a process of its own.

    main.py, settings.py     the server, and what it is told at its start
    service.py               the table of RPCs: authorise, handle, errors to a status (status.py)
    infer.py                 a request to its scheduler and back
    stream.py                many in one call; streamed_request.py: one with any number of responses
    wire/                    bytes to a request (fingerprint.py, request.py), a response to bytes
    admin/                   the other RPCs
    client_identity.py       who calls
    core/                    close to gRPC's core: readers.py, who reads connections;
                             direct_unary.py, calls without a task; direct_stream.py, responses
                             that go out together; call_watchdog.py, calls that wait for their
                             client; sockets.py and connection_limits.py, its connections

What it shares with the HTTP listener is in gateway/inference and gateway/api.
"""

import os

# gRPC writes past our log, and a line for every client that cannot do TLS is too much.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
