"""The measured servers, their processes, and the machine."""
