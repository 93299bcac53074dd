"""The page of /metrics: exporter.py makes it, of families by what they measure."""
