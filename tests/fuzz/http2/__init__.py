"""HTTP/2 conversations: the engine against `h2` and `ngh2`, which know the same protocol.

conversations.py    bytes to what a client and its server do, most of it by the rules
sides.py            the three engines, as far as they are compared
differences.py      where they differ, and why that is right
target.py           the target: a conversation, played to all of them
"""
