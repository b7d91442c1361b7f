"""Base of the lab's tests: storage systems that can be started, and processes that use them."""
