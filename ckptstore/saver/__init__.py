"""Saves in the background: staging, the engines that write, and what is told about it."""
