"""Storage classes: archive and thaw."""
