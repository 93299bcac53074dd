"""The gRPC listener: Triton's service, gRPC's health and reflection, in its own processes.

    main.py                  the server
    connection.py            a client's connection, which uses gateway/http2 for the protocol, and
                             its lifetime: pings, age, drain
    call.py                  unary calls and streaming calls, and the interface of connections
    framing.py               the head and the status of a call, and its messages: assembly,
                             decompression, framing, compression
    service.py               the table of RPCs: authorises and handles calls, and converts errors to
                             a status
    infer.py                 decodes and submits inference requests, and encodes their responses
    stream_infer.py          ModelStreamInfer: many requests in one call, and many responses
    wire/                    converts bytes to a request (fingerprint.py, request.py), and a
                             response to bytes (response.py)
    admin.py                 the other RPCs, and grpc.reflection

The code that both listeners share is in gateway/inference and gateway/api.
"""
