"""Work between stores: replication, eviction, fallback, forks."""
