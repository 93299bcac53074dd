"""What every protocol offers beside inference; no HTTP or gRPC type in here."""
