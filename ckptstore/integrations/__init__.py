"""Integrations with training libraries, file formats and pictures."""
