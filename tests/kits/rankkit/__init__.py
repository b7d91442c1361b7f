"""Ranks of torch.distributed as processes, the states they hold, and their jobs."""
