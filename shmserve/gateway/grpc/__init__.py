"""The gRPC door: Triton's service and gRPC's health service, in a process of its own."""
