"""Ranks of torch.distributed as processes, the states they hold, and what they are told to do."""
