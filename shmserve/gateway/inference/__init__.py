"""Inference requests of every protocol, between the decoders and encoders of HTTP and gRPC.

    decoded: InferRequest                                                    request.py
       │
       ├── header known by its fingerprint ──> RequestTemplate.fill_from     prepare.py
       ├── large tensors not yet received ───> reserve_tensors, in the arena prepare.py
       └── any other ────────────────────────> build_request                 prepare.py
       │
    BuiltRequest ──submit──> UnaryInference, StreamingInference              inference.py
       │
       ├── schema of the response known ─────> its template, by UnaryInference.handle_response
       └── any other ────────────────────────> unpack_response, classify_outputs
       │
    encoded by its protocol

The caches of fingerprints are in http/json/fingerprint.py and grpc/wire/fingerprint.py.
body_arrival.py limits the time and the memory of bodies that are arriving.
"""
