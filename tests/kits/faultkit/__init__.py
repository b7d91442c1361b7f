"""Base of the tests of faults: states, stores, and ways to damage them."""
