"""The execution of a batch."""
