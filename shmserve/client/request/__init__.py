"""A program's tensors to a request, and a response to its tensors."""
