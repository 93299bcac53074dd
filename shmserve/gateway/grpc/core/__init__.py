"""What stands close to gRPC's core: its sockets, its events, its calls, its connections."""
