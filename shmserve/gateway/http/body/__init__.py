"""Request bodies: read as far as they are wanted, within limits of size, time and memory.

reader.py        the stream of a body, as bytes, whole or in parts
read_request.py  the body of an inference request: what is read when, and where to
"""
