"""Repair: recovering damaged pieces, the log, the superblock and key records."""
