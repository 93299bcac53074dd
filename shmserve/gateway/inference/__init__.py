"""Inference requests of every protocol, between the decoders and encoders of HTTP and gRPC."""
