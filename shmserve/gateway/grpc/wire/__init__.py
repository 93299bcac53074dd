"""Protobuf messages to requests, and responses to protobuf messages."""
