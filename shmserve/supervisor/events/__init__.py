"""The event stream: a publish/subscribe feed of what happens in the server, over ZeroMQ."""
