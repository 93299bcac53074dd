"""The time-to-first-response histogram, whose buckets a model's configuration may change.

Models with a decoupled transaction policy have it. `model_metrics` of a configuration names it by
its family and gives other buckets.
"""

from __future__ import annotations

FAMILY = "nv_inference_first_response_histogram_ms"
BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
