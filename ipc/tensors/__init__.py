"""Tensors on the wire. Start with descriptors.py and schemas.py.

datatypes.py arrays.py      the protocol's datatypes, their numpy types, serialized BYTES
descriptors.py              ranges of memory, by which messages refer to tensors
schemas.py                  requests and responses, as values and as schema and data of messages,
                            and caches by schema
signature.py padding.py     inputs and outputs of a model: the check of requests, padded inputs
samples.py                  the warm-up samples of a model's configuration
"""
