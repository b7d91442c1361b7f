"""Torch states: saving one as a version, and loading it whole, in part, or lazily."""
