"""What the tests of faults share: states, stores, and ways to damage them."""
