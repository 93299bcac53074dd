"""The gRPC listener: Triton's service and gRPC's health service, in a process of its own.

    main.py                  the server
    service.py               the table of RPCs: authorise, handle, errors to a status (status.py)
    infer_calls.py           the inference RPCs as calls, directly on gRPC's core and by grpc.aio
    infer.py                 an inference request to its scheduler and back
    stream_call.py           ModelStreamInfer: many requests in one call, and many responses
    wire/                    bytes to a request (fingerprint.py, request.py), a response to bytes
    admin.py                 the other RPCs
    client_identity.py       who calls, and whether it is authorised
    core/                    close to gRPC's core: readers.py, who reads connections; core_call.py,
                             calls taken from it; direct_unary.py, those without a task;
                             direct_stream.py, responses written in batches; call_watchdog.py,
                             timeouts of calls; sockets.py and connection_limits.py, connections

What it shares with the HTTP listener is in gateway/inference and gateway/api.
"""

import os

# gRPC writes past our log, and a line for every client that cannot do TLS is too much.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
