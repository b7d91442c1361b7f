"""One version's tensors: writing a state, reading it back whole, in part, or lazily."""
