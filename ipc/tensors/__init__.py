"""Tensors on the wire: datatypes, descriptors, packed requests and responses, model signatures."""
