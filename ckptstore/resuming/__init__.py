"""Proof that a resumed training goes on as the one that was saved."""
