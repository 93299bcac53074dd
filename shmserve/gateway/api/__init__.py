"""The APIs besides inference for all protocols, without any HTTP or gRPC types."""
