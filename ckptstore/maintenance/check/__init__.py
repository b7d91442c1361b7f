"""Checks: finding damage, lost commits, and the newest version that is sound."""
