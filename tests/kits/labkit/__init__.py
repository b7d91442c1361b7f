"""What the lab's tests stand on: systems that can be started, and processes that use them."""
