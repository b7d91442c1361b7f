"""ckptstore."""
