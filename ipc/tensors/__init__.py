"""Tensors between processes: datatypes, descriptors, what a model takes, and cached templates."""
