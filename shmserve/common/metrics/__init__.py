"""What schedulers and workers count, and gateways show: counters, histograms, models' own
metrics (pure)."""
