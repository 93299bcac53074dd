"""The HTTP listener: connections, routes, bodies, responses."""
