"""What is measured: under load, streaming, natively, and of one server alone."""
