"""The cases: under load, streaming, natively, and of one server alone."""
