"""The codec of inference messages: protobuf to requests, responses to protobuf."""
