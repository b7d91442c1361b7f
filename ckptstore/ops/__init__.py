"""Maintenance of a store: verify, usage. No torch."""
