"""Reports: usage, sharing, differences, figures for Prometheus."""
