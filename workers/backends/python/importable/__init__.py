"""The folder on the import path of Python models."""
