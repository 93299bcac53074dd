"""The gateways: processes in which the clients' requests come in, over HTTP or over gRPC.

An HTTP request, file by file:

    http/connection/protocol.py     bytes -> requests, one after the other
    http/routing.py                 matched, authorised, handled, errors to responses; the tables
                                    of routes are in routes.py
    http/infer.py                   inference; streaming/ for responses in many parts
    http/body.py                    the body: as much of it as is wanted, when it is wanted
    http/json/fingerprint.py        a header that came before: its prepared request, else
    http/json/infer_request.py      JSON -> inference/request.py, checked
    inference/builder.py            its tensors placed and checked against its model
    inference/submit.py             its regions authorised; the message to the scheduler
    links.py                        submitted, in flight until the scheduler has responded
    http/json/infer_response.py     the response as JSON and binary tensors
    http/messages.py                written

A gRPC request:

    grpc/connection.py              bytes -> http2/, an engine without IO -> calls (grpc/calls/)
    grpc/service.py                 the call authorised, errors to a status
    grpc/infer.py                   to its scheduler and back; stream_call.py: many in a call
    grpc/wire/prepared_requests.py  a message like one that came before, else
    grpc/wire/request.py            protobuf -> inference/request.py, checked
    inference/ and links.py         as above
    grpc/wire/response.py           the response as protobuf

    process.py, settings.py         a gateway's process, and what it is told at its start
    context.py                      its state (model_table.py, region_table.py), and loading on
                                    demand
    compression.py                  gzip and deflate, of HTTP bodies and of gRPC's messages
    client_identity.py              who a client is, and what it may; connection_limits.py: how
                                    many connections there may be
    inference/, api/                inference and the other APIs, for any protocol; the page of
                                    /metrics, and the families on it, are in api/metrics.py
    request_trace.py, tracer.py     traces of requests: the log and the trace file; otel.py:
                                    their export to OpenTelemetry
    http/dashboard.py               the dashboard's page, and the feed of api/figures.py
    http/handlers.py, grpc/admin.py what HTTP and gRPC make of these
"""
