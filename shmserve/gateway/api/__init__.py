"""The APIs beside inference, for every protocol; no HTTP or gRPC type in here."""
