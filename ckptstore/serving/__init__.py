"""Versions as files for programs that know nothing of stores: a server, and a file system."""
