"""The codec of inference messages.

fingerprint.py   a message that equals an earlier one, except for its values
request.py       protobuf to a request
response.py      a response to protobuf
"""
