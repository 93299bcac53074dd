"""The codec of ModelInferRequest and ModelInferResponse.

fingerprint.py   cached templates of requests, for messages that differ only in their tensors
request.py       decodes requests
response.py      encodes responses
"""
