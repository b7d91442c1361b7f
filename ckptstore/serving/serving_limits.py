"""Limits of the server and of the files that it makes, each with its source."""

from __future__ import annotations

from typing import Final

from ckptstore.limits import GIB, KIB, MIB

# Bytes of tensors that one request reads at a time. Source: as a chunk, which is read whole; 16
# requests with one window read and one being sent take 128 MiB.
WINDOW_BYTES: Final = 4 * MIB
# Largest base of a view that is held whole, as it is not contiguous. Source: an embedding of 128k x
# 4096 in bfloat16; larger ones are exported.
VIEW_BYTES_MAX: Final = GIB
# Largest file of weights before it is split. Source: the defaults of save_pretrained of
# transformers 5 (50GB), and of save_torch_state_dict of huggingface_hub 2 (5GB).
SHARD_BYTES: Final = 50 * 10**9
SHARD_BYTES_AS_READ: Final = 5 * 10**9
# Folders that are kept in memory, and the bytes of their small files. Source: a tokenizer of 20 MB
# for each of three models; the plan of a model of 10,000 tensors takes 10 MB.
FOLDERS_KEPT: Final = 8
FOLDER_BYTES_KEPT: Final = 64 * MIB
# Seconds between two looks for new commits. Source: a listing of a bucket takes 0.1 s.
REFRESH_S: Final = 0.5

# Requests that send files at the same time; others wait, then get 503. Source: 16 clients stay
# below 300 MiB (measured by tests/serving/test_hardening.py).
DOWNLOADS_MAX: Final = 16
DOWNLOAD_WAIT_S: Final = 30.0
# Up to so many of them have three windows in memory each, others two. Source: two processors then
# decode for one client, and 4 times three windows take less than 16 times two.
DOWNLOADS_WIDE: Final = 4
# Open connections; beyond them the oldest idle one is closed. Source: half of the 1,024 files that
# a process may have open by default.
CONNECTIONS_MAX: Final = 512
# Line and headers of a request. Source: nginx has four buffers of 8 KiB.
HEADER_BYTES_MAX: Final = 32 * KIB
# Body of a request: names of files, of paths-info. Source: 1,000 names of 64 characters.
BODY_BYTES_MAX: Final = 64 * KIB
# Seconds between two looks at a connection: one without a request is closed after two of them, as
# is one that takes less than this many bytes in one. Source: nginx gives up after 60 s.
CONNECTION_CHECK_S: Final = 15.0
READER_BYTES_MIN: Final = 64 * KIB
# Seconds that downloads get to finish after SIGTERM. Source: schedulers send SIGKILL after 30.
STOP_S: Final = 10.0
# Entries of one answer. Source: S3 lists at most 1,000 keys, the Hub's tree as many.
PAGE_ENTRIES: Final = 1000
# Difference of the clocks of a signed request. Source: S3 allows 15 minutes.
SIGNATURE_AGE_S: Final = 900.0
# Shortest token. Source: 96 bits in hex are 24 characters; 16 of base64 as well.
TOKEN_CHARS_MIN: Final = 16
