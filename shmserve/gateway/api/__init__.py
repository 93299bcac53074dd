"""The APIs other than inference, for all protocols: without any HTTP or gRPC types."""
