"""Fuzzing: any bytes from a client give a clear error or nothing."""
