"""The parts close to gRPC's core: its sockets, its readers, its calls, its connections."""
