"""The gRPC listener: Triton's service, gRPC's health and reflection, in its own processes.

    main.py                  the server
    connection.py            a client's connection, on the engine without IO;
                             tls_layer.py; lifetime.py: pings, age, drain; front.py: what all share
    calls.py                 calls; call_head.py: method, deadline, metadata; messages.py: assembled
                             and inflated; response_blocks.py: the heads and ends of responses
    service.py               the table of RPCs: authorise, handle, errors to a status (status.py)
    infer_calls.py           the inference RPCs as calls
    infer.py                 an inference request to its scheduler and back
    placed_request.py        a large one, whose tensors go to the arena while they arrive
    stream_call.py           ModelStreamInfer: many requests in one call, and many responses
    wire/                    bytes to a request (fingerprint.py, request.py, arriving.py), a response
                             to bytes
    admin.py, reflection.py  the other RPCs

The engine is in gateway/http2, what it shares with the HTTP listener in gateway/inference and
gateway/api.
"""
