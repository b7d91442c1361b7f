"""Garbage collection: condemn, repack, sweep."""
