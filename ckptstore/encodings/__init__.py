"""Encodings: how tensors are stored in fewer bytes than they take in memory."""
