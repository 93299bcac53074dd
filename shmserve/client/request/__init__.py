"""Conversion of a program's tensors to a request, and of a response to tensors."""
