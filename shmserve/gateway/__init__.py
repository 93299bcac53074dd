"""The gateways: processes that receive the requests of clients over HTTP or gRPC.

The files that an HTTP request passes through, in order:

    listener.py                     accepts connections: the access rules of a listener, the
                                    identity of its clients, and the limits of its connections
    http/incoming.py                parses bytes into requests (http/messages.py), within limits of
                                    time and memory
    http/connection.py              handles the requests in the order of their arrival
    http/routing.py                 finds the route in routes.py, authorises, calls the handler;
                                    converts errors to responses
    http/infer.py                   inference; response_queue.py for responses in many parts
    context.py                      finds the model, or loads it on demand; stores the objects that
                                    all handlers share
    http/body.py                    reads the body and decodes it to a request
    http/json/fingerprint.py        fills a cached template if the JSON header is known, otherwise
    http/json/codec.py              decodes JSON (text: parser.py, values: tensors.py) to an
                                    `InferRequest` (inference/infer_request.py), and checks it
    inference/prepare.py            stores and checks the tensors; large ones while they arrive
                                    (body_arrival.py limits the time and the memory)
    inference/in_flight.py          submits the request, and unpacks the response
    links.py                        stores the request until the scheduler has responded (base
                                    class: ipc/scheduler_client.py)
    http/json/codec.py              encodes the response as JSON and binary tensors, which
                                    http/messages.py writes

The files that a gRPC request passes through:

    listener.py                     as for HTTP
    grpc/connection.py              passes bytes to http2/connection.py, and its events to calls;
                                    http2/incoming.py parses frames, http2/outgoing.py sends them
    grpc/service.py                 authorises the call; converts errors to a status
    grpc/call.py                    the call, whose messages grpc/framing.py assembles
    grpc/infer.py                   inference; stream_infer.py for many requests in a call
    grpc/wire/fingerprint.py        fills a cached template if the message is known, otherwise
    grpc/wire/request.py            decodes protobuf to an `InferRequest`, and checks it
    context.py, inference/, links.py
                                    as for HTTP
    grpc/wire/response.py           encodes the response as protobuf

Other files:

    process.py, settings.py         the process of a gateway, and its settings
    http/main.py, grpc/main.py      serve the listeners that the supervisor has opened
    region_table.py                 the registered shared memory regions
    compression.py                  gzip and deflate, of HTTP bodies and of gRPC's messages
    inference/classification.py     outputs as their largest values, with labels
    api/                            all operations except inference, for any protocol;
                                    api/metrics.py has the metric families of /metrics
    request_trace.py, tracer.py     traces of requests in the log and in the trace file; otel.py
                                    exports them to OpenTelemetry
    http/openai/, http/generate.py  OpenAI's API, and flat JSON requests; both read responses from
                                    the `ResponseQueue` of http/response_queue.py
    http/dashboard.py               the page of the dashboard, and its feed of api/figures.py
    http/handlers.py, grpc/admin.py the HTTP and gRPC handlers of the operations in api/
"""
