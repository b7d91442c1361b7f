"""Tasks run by threads, by processes of this machine, or by the workers of a Dask scheduler."""
