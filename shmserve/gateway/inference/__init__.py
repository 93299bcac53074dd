"""Inference requests, whatever protocol they came by: built, admitted, submitted; responses."""
