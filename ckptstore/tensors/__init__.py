"""Conversion between Python states and skeletons with tensors."""
