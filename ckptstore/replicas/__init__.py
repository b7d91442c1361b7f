"""Replicas of a store: opened when they are needed, read from, and written back to."""
