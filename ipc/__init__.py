"""The boundary: the only words and memory that processes share."""
