"""The facade: what users hold. It delegates and holds no algorithm.

Importing it does not import torch: what needs tensors is imported when it is first used, so that
the command line stays quick.
"""

from ckptstore.store.opening import mend_keys, mend_superblock, open_store, rotate_key
from ckptstore.store.run import Run
from ckptstore.store.store import Store

__all__ = ["Run", "Store", "mend_keys", "mend_superblock", "open_store", "rotate_key"]
