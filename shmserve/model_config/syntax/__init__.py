"""Syntax of configurations: protobuf text format and JSON, to a syntax tree, to a message."""
