"""The gateways: processes that receive the requests of clients over HTTP or gRPC.

The files that an HTTP request passes through, in order:

    http/main.py                    opens the listeners
    listener.py                     accepts connections: the access rules of a listener, the
                                    identity of its clients, and the limits of its connections
    http/incoming.py                parses bytes into requests (http/messages.py), within limits of
                                    time and memory
    http/connection.py              handles them in the order of their arrival
    http/routing.py                 finds the route in routes.py, authorises, calls the handler;
                                    converts errors to responses
    http/infer.py                   inference, and the queue of responses in many parts
    context.py                      finds the model, or has it loaded; the objects that all handlers
                                    share
    http/body.py                    reads the body and decodes it to a request
    http/json/fingerprint.py        fills a template if the header is known, otherwise
    http/json/codec.py              decodes JSON (text: parser.py, values: tensors.py) to
                                    inference/request.py, and checks it
    inference/prepare.py            places and checks the tensors; large ones while they arrive
                                    (body_arrival.py limits the time and the memory)
    inference/inference.py          submits the request, and unpacks the response
    links.py                        keeps the request until the scheduler has responded, by
                                    ipc/scheduler_client.py
    http/json/codec.py              the response as JSON and binary tensors, which
                                    http/messages.py writes

A gRPC request:

    listener.py                     as above
    grpc/connection.py              passes bytes to http2/connection.py, and its events to calls;
                                    http2/incoming.py parses frames, http2/outgoing.py sends them
    grpc/service.py                 authorises the call; errors become a status
    grpc/call.py                    the call, whose messages grpc/framing.py assembles
    grpc/infer.py                   inference; stream_infer.py for many requests in a call
    grpc/wire/fingerprint.py        fills a template if the message is known, otherwise
    grpc/wire/request.py            decodes protobuf to inference/request.py, and checks it
    context.py, inference/, links.py
                                    as above
    grpc/wire/response.py           the response as protobuf

    process.py, settings.py         the process of a gateway, and its settings
    region_table.py                 the registered shared memory regions
    compression.py                  gzip and deflate, of HTTP bodies and of gRPC's messages
    api/                            the other APIs, for any protocol; api/metrics.py has the
                                    families of /metrics
    request_trace.py, tracer.py     traces of requests: the log and the trace file; otel.py:
                                    their export to OpenTelemetry
    http/openai/, http/generate.py  OpenAI's API, and flat JSON requests, by http/infer.py's queue
    http/dashboard.py               the page of the dashboard, and the feed of api/figures.py
    http/handlers.py, grpc/admin.py the handlers of api/ for HTTP and for gRPC
"""
