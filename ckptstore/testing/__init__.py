"""Tests that show whether a storage backend can be trusted, also for backends of third parties.

Subclass :class:`~ckptstore.testing.conformance.BackendConformance` in a pytest module, give it a
``backend`` fixture and a side door, and run it. ``FaultyBackend`` makes a good backend fail on
purpose. The suite needs pytest, which ckptstore itself does not.
"""
