"""Tasks run by threads, by the workers of a Dask scheduler, or by any executor."""
