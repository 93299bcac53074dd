"""Protobuf schemas of our own, wire- and text-compatible with Triton's.

After an edit of a .proto: `python -m shmserve.proto.compile` (needs grpcio-tools).
"""
