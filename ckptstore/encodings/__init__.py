"""Forms in which a float tensor takes fewer bytes, and what restores it; NumPy alone, no torch."""
