"""The response cache of one model version: requests that come again are not executed again.

key.py     what makes two requests the same: a digest over all that the model sees
lru.py     entries within a bound of bytes, the least recently used evicted (pure)
cache.py   requests in, responses out, and the memory that large ones are read from
"""
