"""The gRPC listener: Triton's service, gRPC's health and reflection, in its own processes.

    main.py                  the server
    connection.py            a client's connection, on the engine without IO in gateway/http2, and
                             its lifetime: pings, age, drain
    call.py                  unary calls and streaming calls, and the interface of connections
    framing.py               the head and the status of a call; messages: assembled and inflated,
                             framed and deflated
    service.py               the table of RPCs: authorise, handle, errors to a status
    infer.py                 inference requests: decoded, submitted, and their responses encoded
    stream_infer.py          ModelStreamInfer: many requests in one call, and many responses
    wire/                    bytes to a request (fingerprint.py, request.py), a response to bytes
    admin.py                 the other RPCs, and grpc.reflection

The code that both listeners share is in gateway/inference and gateway/api.
"""
