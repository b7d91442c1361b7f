"""Every limit and default, each with its unit, its reason and its source.

Bytes are powers of two. A name ends in its unit. A limit (``_MAX``) bounds the input that is
accepted from storage, which is treated as hostile; a default can be set by the user.
Sources: "measured" means by ``benchmarks/`` on the machine that benchmarks/RESULTS.md names.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

# --- chunks and packs -------------------------------------------------------------------------

# Default size of a chunk before compression. Source: 4 MiB keeps the table of
# 1 TB at 250k chunks and a chunk inside a typical L3 cache (measured 1-16 MiB: docs/design/0003).
CHUNK_BYTES_DEFAULT: Final = 4 * MIB
# Smallest and largest chunk size that a store may be created with. Source: below 64 KiB the
# 64-byte chunk header and the 57-byte table row pass 0.2%; above, see CHUNK_RAW_BYTES_MAX.
CHUNK_BYTES_MIN: Final = 64 * KIB
# Largest chunk, decoded, that a reader accepts. Source: bounds what a hostile header can ask for.
CHUNK_RAW_BYTES_MAX: Final = 64 * MIB
# Largest encoded chunk. Source: a codec expands only by its framing, at most this much.
CHUNK_STORED_BYTES_MAX: Final = CHUNK_RAW_BYTES_MAX + 64 * KIB
# Tensors below this share a chunk (a slab). Source: at 64 KiB the header and table row of a
# separate chunk cost 0.2%; below, they would cost more than 100 bytes a tensor.
SMALL_TENSOR_BYTES: Final = 64 * KIB
# A slab is closed at this size. Source: one changed tensor rewrites at most its own bytes, but a
# reader of one small tensor fetches the slab: 256 KiB is one round trip's worth on object stores.
SLAB_BYTES: Final = 256 * KIB
# Where packs are collected in memory, those of a small write are smaller, so that the first is sent
# while the others are filled: about this many, of at least this many bytes. Source:
# docs/design/0014; AWS's performance guide advises at least 8-16 MB a request.
PACKS_OF_A_WRITE: Final = 12
PACK_BYTES_MIN: Final = 16 * MIB
# There, the first pack of a stream has this size, each next one twice as much. Source: as above.
PACK_BYTES_FIRST: Final = 8 * MIB
# There, so many packs at least are unfinished at once if they fit. Source: docs/design/0014, 0025.
PACKS_AT_ONCE: Final = 6
# Packs of copied chunks may be larger: this many are in memory. Source: as above; such a pack is
# soon full, and copies should have few packs.
COPIED_PACKS_IN_MEMORY: Final = 3
# Largest pack that a reader accepts. Source: 16x the largest default; far under S3's 5 GiB PUT.
PACK_BYTES_MAX: Final = 4 * GIB

# Tensors below this are stored directly, even where one is another rounded. Source: a recipe takes
# some 100 bytes of a manifest; a load of such a tensor alone reads twice its bytes.
DERIVED_BYTES_MIN: Final = 1 * KIB

# --- memory -----------------------------------------------------------------------------------

# Host memory that one save or load may hold for chunks in flight. Source: docs/design/0025.
HOST_BYTES_DEFAULT: Final = 512 * MIB
# A message of a rank in a load by many ranks. Source: holds an error of 1,800 characters.
RANK_MESSAGE_BYTES: Final = 8 * KIB
FILE_PART_BYTES: Final = 64 * MIB  # Held by a stream. Source: a pack; HOST_BYTES_DEFAULT has 8.
# Blocks of a host's cache; bytes of all; part of its file system that stays free, at most so much.
# Source: a request touches 1-2 in vain; a model of 1.3 billion parameters; /dev/shm is also NCCL's.
CACHE_BLOCK_BYTES: Final = 1 * MIB
CACHE_BYTES_DEFAULT: Final = 16 * GIB
CACHE_FREE_PART: Final = 8
CACHE_FREE_BYTES: Final = 8 * GIB
# Seconds for which a process waits for another's block; between looks, or of what was waited this
# share; and for which what was there counts as there. Source: 1 s a block at 1 MB/s; less than any
# grace.
CACHE_WAIT_S: Final = 30.0
CACHE_POLL_S: Final = 0.003
CACHE_POLL_SHARE: Final = 1 / 8
CACHE_STAT_S: Final = 10.0
# Host memory that a store keeps between saves for the base pieces of deltas. Source: a store
# used with codec delta may hold as much between saves as during one; pieces beyond it
# are read again, one range of 4 MiB a piece.
BASE_BYTES_DEFAULT: Final = 256 * MIB
# Threads that hash, encode and decode. Source: each stage releases the GIL; more than 8 saturate
# memory bandwidth on the machines in published figures of peers.
WORKERS_MAX: Final = 8

# --- the choice of ``codec="auto"`` ------------------------------------------------------------

# Bytes a second of one thread: copy and hash; encode too. Source: BLAKE3 at 5.3 GB/s behind a copy
# at 10 GB/s, and a compressed save of 1.16 GB/s with two threads, both halves of one core, on the
# machine of benchmarks/RESULTS.md.
AUTO_HASH_BYTES_PER_S: Final = 2_200_000_000
AUTO_ENCODE_BYTES_PER_S: Final = 600_000_000
# Stored share of a compressed save. Source: mixed precision with Adam.
AUTO_RATIO: Final = 0.82
# Write rate assumed of a backend that declares none. Source: one client of an object store.
WRITE_BYTES_PER_S_DEFAULT: Final = 200_000_000

# --- saves in the background ------------------------------------------------------------------

# Share of the memory that the process may use (the least of the machine's and its cgroup's) that
# staged states may take, unless `staging_bytes` says otherwise. Source: leaves as much again for
# the training; this limit refuses a state that does not fit, by name, before the OOM killer acts.
STAGING_MEMORY_SHARE: Final = 0.5
# Saves that are staged and not yet durable, of one store. Source: a second one takes its bytes a
# second time, and helps only where the storage is slower than the interval between saves.
IN_FLIGHT_DEFAULT: Final = 1
# Bytes of a tensor, at four places, that are compared after staging. Source: detects changes of all
# of a tensor without notice to torch (an optimizer in C++, `.data`); 64 bytes cost microseconds.
WITNESS_BYTES: Final = 16
WITNESS_PLACES: Final = 4
# Niceness of background writing, relative to the training. Source: Linux gives it 110 shares
# where the training has 1024 (sched_prio_to_weight): a tenth of a core that both want; at 19
# it would be a hundredth, and a save beside busy data loaders would not end.
BACKGROUND_NICE: Final = 10
# Seconds between progress reports of a child process. Source: ten times a second is smooth.
PROGRESS_S: Final = 0.1
# Seconds that closing waits for a child that has no work left. Source: it exits in milliseconds.
CHILD_EXIT_S: Final = 10.0
# Seconds from a signal that announces the end to the deadline of the last save. Source: Kubernetes,
# Slurm (KillWait) and torchrun kill after 30 s by default; 5 s are left to end the process.
PREEMPTION_DEADLINE_S: Final = 25.0

# --- write-back ------------------------------------------------------------------------------

# Threads, and host memory for chunks in flight, of the replication of new versions behind a
# training. Source: two keep a link of 1 GB/s busy, and leave the processors to the training; its
# memory is bounded separately from that of saves.
WRITE_BACK_WORKERS: Final = 2
WRITE_BACK_HOST_BYTES: Final = 128 * MIB
# Versions that one replication copies, after the newest, which is copied alone. Source: the newest
# is the dearest loss if the hot store fails; eight share the requests that begin and end each.
WRITE_BACK_BATCH: Final = 8
# Newest versions of each run that are searched after a save for versions from elsewhere
# (forks, imports, other ranks); all are, once, at the beginning. Source: one takes microseconds.
WRITE_BACK_LOOK: Final = 64
# First and longest pause after a failure, in seconds, doubled from one to the next, with jitter.
# Source: the backend's own retries take up to 51 s already; five minutes are short
# beside an outage of an hour of an object store.
WRITE_BACK_PAUSE_S: Final = 1.0
WRITE_BACK_PAUSE_MAX_S: Final = 300.0
# Seconds that the exit of a process waits for write-back if its store was not closed. Source:
# schedulers kill 30 s after their signal; the next process that opens the store catches up.
WRITE_BACK_EXIT_S: Final = 10.0

# --- records ----------------------------------------------------------------------------------

# store.json. Source: a probe report is under 4 KiB; 16x is slack.
SUPERBLOCK_BYTES_MAX: Final = 64 * KIB
# One commit. Source: a save with 64 metrics is under 32 KiB; a condemn of 10,000 names under 1 MiB.
COMMIT_BYTES_MAX: Final = 4 * MIB
# Operations in one commit. Source: create-run, save and a few tags travel together.
COMMIT_OPS_MAX: Final = 1024
# Versions that one operation names, and objects that one condemns. Source: 40,000 keys of 50 bytes
# are 2 MB of COMMIT_BYTES_MAX; more go into further commits.
VERSIONS_PER_OP_MAX: Final = 40_000
KEYS_PER_OP_MAX: Final = 40_000
# Other stores recorded as holding a version; the newest count. Source: two clouds of three
# regions each, tape, and as much again; each costs 33 bytes a version in the catalog.
REPLICAS_MAX: Final = 16
# Name of a replica, and its URL. Source: a name fits a column of a table; S3 and GCS
# allow 1,024 bytes of key, and a path of Linux 4,096, which nobody types.
REPLICA_NAME_CHARS_MAX: Final = 64
REPLICA_URL_CHARS_MAX: Final = 2048
# Overlap of `--since last` with the last success, in seconds. Source: a commit is tried for
# COMMIT_WAIT_S, and unmanaged clocks are minutes off; looking again at known versions is free.
SINCE_SLACK_S: Final = 3600.0
# A job file. Source: rules and options of two stores are under 4 KiB; 16x is slack.
JOB_BYTES_MAX: Final = 64 * KIB
# Highest rate in a job file. Source: 1 PiB a second, which no link has.
RATE_BYTES_PER_S_MAX: Final = 1 << 50
# Reason for deleting or rolling back a version. Source: one line of a terminal or two.
REASON_CHARS_MAX: Final = 500
# Commits in one folder of the log. Source: one listing request of S3 or GCS returns 1,000 names.
COMMITS_PER_FOLDER: Final = 1000
# Highest commit number. Source: the folder in the key has 6 digits, and keys must sort as numbers.
COMMIT_NUMBER_MAX: Final = 10**9 - 1
# Versions that one commit relocates. Source: an operation takes up to 10 KB with 64 roles, so
# 2.5 MB of COMMIT_BYTES_MAX, and two operations in three stay free in COMMIT_OPS_MAX.
RELOCATES_PER_COMMIT: Final = 256
# The same where weights are rounded. Source: 16 versions of 1 GB, lost in a crash, take minutes.
ROUNDED_PER_COMMIT: Final = 16
# Level at which records (manifests, snapshots) are compressed. Source: zstd's own default.
RECORD_ZSTD_LEVEL: Final = 3
# Required features that a superblock may name. Source: one a release for sixty releases.
FEATURES_MAX: Final = 64
# A manifest as stored, and decompressed. Source: 57 bytes a chunk: 4 TB of 4 MiB chunks is 57 MB;
# 16x is slack and still fits in memory.
MANIFEST_STORED_BYTES_MAX: Final = 1 * GIB
MANIFEST_RAW_BYTES_MAX: Final = 2 * GIB
# A catalog snapshot, decompressed. Source: about 600 bytes a version; a million versions.
SNAPSHOT_RAW_BYTES_MAX: Final = 1 * GIB
# Rows of a catalog snapshot. Source: a row takes 650 bytes of a reader's memory; with more rows
# readers use the log instead, and no snapshot is written.
SNAPSHOT_VERSIONS_MAX: Final = 2_000_000
SNAPSHOT_RUNS_MAX: Final = 200_000
# A decompressed record may be at most this many times its stored size (checked besides the
# absolute limit, so that a small hostile file cannot claim gigabytes). Source: the skeleton of
# 100,000 equal leaves compresses about 500x.
RECORD_RATIO_MAX: Final = 2000
# Records up to this size are exempt from the ratio. Source: small enough not to matter.
RECORD_RATIO_FREE_BYTES: Final = 16 * MIB
# Tensors, pieces and nesting of one version. Source: the largest published MoE states have some
# 10^6 tensors with optimizer; depth 64 is beyond any real state and safe for the recursion limit.
# A reader holds some 230 bytes for each tensor that a manifest claims, and some 120 for each node.
TENSORS_MAX: Final = 2_000_000
PIECES_MAX: Final = 100_000_000
PACKS_MAX: Final = 4_000_000
# Boxes that hold the tensors of one version, except slabs. Source: 1,000 ranks
# with a tile each of 4,000 tensors. A reader holds 16 bytes for each dimension of a box.
BLOCKS_MAX: Final = 4_000_000
# Cells of the grid formed by the borders of one tensor's boxes. Source: a mesh makes one a rank;
# boxes without order make the square of their number: 2,000 of them pass.
BLOCK_CELLS_MAX: Final = 1 << 24
# Elements that share a scale unless a rule says otherwise. Source: scales then take 1.6% of the
# codes; with 2048 (Dettmers et al. 2022, section 2.1) one outlier spoils eight times as many.
ENCODING_BLOCK_DEFAULT: Final = 256
# Tensors with fewer elements are stored losslessly, whatever rule matches them. Source: the 8-bit
# optimizers of Dettmers et al. 2022 leave these alone (min_8bit_size of bitsandbytes); norms and
# biases, which are sensitive, are among them, and no state has a thousandth of its bytes in them.
ENCODED_ELEMENTS_MIN: Final = 4096
# Tensors that a version's metadata list as stored lossless against a rule. Source: at 300 bytes
# each a tenth of METADATA_BYTES_MAX; the log names all.
KEPT_LISTED_MAX: Final = 100
# Relative error from which on a tensor is stored losslessly, even if its rule has no bound. Source:
# rounding to two bits of mantissa, the coarsest form, makes at most 1/8; twice that means that the
# tensor does not fit the range of the form.
ENCODING_REL_L2_MAX: Final = 0.25
# Elements that share one scale, where a tensor is stored in codes of 8 bits. Source: a scale of 4
# bytes for fewer than 8 codes makes them larger than float16; beyond 2048 (Dettmers et al. 2022,
# section 2.1) outliers spoil the rest, and 2^20 leave room for experiments.
RECIPE_BLOCK_MIN: Final = 8
RECIPE_BLOCK_MAX: Final = 1 << 20
STATE_DEPTH_MAX: Final = 64
STATE_NODES_MAX: Final = 5_000_000
TENSOR_DIMS_MAX: Final = 64  # Source: torch refuses more than 64 dimensions.
# A skeleton, decoded. Source: a leaf takes some 30 bytes, so 10^6 tensors take 30 MB; long bytes
# and strings are kept as tensors; the rest is room for lists of numbers.
SKELETON_BYTES_MAX: Final = 128 * MIB
# Bytes and strings of the state from this size on are stored as tensors, not in the skeleton.
# Source: a record of the manifest costs under 100 bytes; every load reads the whole skeleton.
INLINE_BYTES_MAX: Final = 4 * KIB
# Pairs of views of one storage that are tested for true overlap. Source: 2 us each (measured), so
# 20 ms at most; beyond it views with overlapping extents count as sharing memory, which is safe.
ALIAS_PAIRS_MAX: Final = 10_000
# Digits of integers beyond 64 bits. Source: CPython's own limit, default_max_str_digits.
INT_DIGITS_MAX: Final = 4300

# --- names ------------------------------------------------------------------------------------

RUN_NAME_CHARS_MAX: Final = 200  # Source: fits a terminal table and a file name.
TAG_CHARS_MAX: Final = 100  # Source: as above.
METRIC_NAME_CHARS_MAX: Final = 200  # Source: names such as eval/mmlu/high_school_physics/acc.
METRICS_MAX: Final = 1000  # Source: an evaluation harness reports a few hundred.
TAGS_PER_VERSION_MAX: Final = 100  # Source: tags are typed by people.
METADATA_BYTES_MAX: Final = 256 * KIB  # Source: a full training config is under 64 KiB.
METADATA_DEPTH_MAX: Final = 32  # Source: configs are 3-6 deep; far under the recursion limit.
ROLE_CHARS_MAX: Final = 100  # Source: as tags.
ROLES_MAX: Final = 64  # Source: five have names of their own; users add a few.
RECEIPT_ENTRIES_MAX: Final = 64  # Source: seconds and bytes of each stage of a save.
POLICY_RULES_MAX: Final = 64  # Source: a level of a policy has one to three; a few a metric.
POLICY_CHARS_MAX: Final = 16_384  # Source: 64 rules whose metrics have the longest names.
BY_CHARS_MAX: Final = 300  # Source: user@host pid; Linux host names have at most 64 characters.
TIME_MS_MAX: Final = 253_402_300_799_999  # Source: the end of year 9999, where datetime ends.
STEP_MAX: Final = 2**63 - 1  # Source: signed 64 bits, as msgpack, JSON readers and NumPy hold it.
KEY_CHARS_MAX: Final = 512  # Source: S3 and GCS allow 1,024 bytes, prefix of the store included.

# --- the log ----------------------------------------------------------------------------------

# A catalog snapshot is written at every multiple of a period: this many commits, doubled as long
# as it stays under the growth's share of the log. Source: a version takes about 200 bytes in a
# snapshot, so that snapshots cost at most 500 * 200 = 100 KB of writing a commit at any length of
# the log, and opening reads at most max(100, log / 500) commits after the newest.
SNAPSHOT_COMMITS_MIN: Final = 100
SNAPSHOT_GROWTH: Final = 0.002
# After this many periods without a snapshot, the next committer writes one. Source: the writer of
# the commit that was due may have died; two misses in a row are rare.
SNAPSHOT_OVERDUE_PERIODS: Final = 3
# Snapshots tried on opening before the log is read from its beginning. Source: SNAPSHOTS_KEPT, and
# leftovers of an interrupted pruning.
SNAPSHOT_TRIES_MAX: Final = 4
# A replication writes a snapshot in the target after this many commits; after one in 1000 of its
# versions, if that is more. Source: the next replication, a process of its own, opens the store and
# finds nothing new with less than 10 requests; a snapshot of 1000 versions is some 200 KB.
SNAPSHOT_LEFT_COMMITS: Final = 3
# A catalog snapshot as stored. Source: half of it is random ids and digests, which do not compress.
SNAPSHOT_STORED_BYTES_MAX: Final = 1 * GIB
# Snapshots kept, which are caches. Source: one spare if the newest is damaged.
SNAPSHOTS_KEPT: Final = 2
# A reference record, stored or decompressed. Source: 53 bytes a version and its pack.
REFERENCES_BYTES_MAX: Final = 256 * MIB
# Seconds that a commit tries numbers before it gives up. Source: 8 writers x 25 saves on one
# store need seconds; a minute of contention means a thousand writers.
COMMIT_WAIT_S: Final = 300.0
# Back-off between tries at successive numbers, full jitter, in seconds. Source: about the time of
# one commit on a local disk and on a busy object store.
COMMIT_BACKOFF_BASE_S: Final = 0.005
COMMIT_BACKOFF_CAP_S: Final = 1.0
# Times that the same commit is sent again after ambiguous answers.
# Source: each send is itself retried by the backend's wrapper.
COMMIT_SENDS_MAX: Final = 3
# Commits read ahead at once while folding. Source: bounds memory to a thousand small records.
COMMIT_READ_BATCH: Final = 1000
# Newest records that can be set aside at once. Source: what a trainer that commits every second
# writes in the 30 s after which Linux writes dirty pages (dirty_expire_centisecs), threefold.
SET_ASIDE_MAX: Final = 100
# Seconds that a name known to exist may seem absent. Source: NFS caches a failed lookup for
# up to 30 s between two real clients (measured); twice that.
VISIBILITY_WAIT_S: Final = 60.0
# The same where the backend declares no lag. Source: covers a directory read that raced a writer.
VISIBILITY_WAIT_MIN_S: Final = 1.0

# Manifests that no commit names, with no commit between them, before a collection considers the log
# truncated. Source: a save leaves one behind only if it dies within the milliseconds between
# manifest and commit, and between two such saves others commit.
STRAY_MANIFESTS_MAX: Final = 16
# Times that a save writes objects again that a collection condemned during it. Source: each time
# needs a collector that lists, condemns and commits between two commits of the saver, with no grace
# for orphans at all; eight in a row mean that someone collects in a loop with such settings.
CONDEMNED_TRIES_MAX: Final = 8

# --- collection -------------------------------------------------------------------------------

# Seconds that condemned objects stay for readers. Source: 1 TB at 500 MB/s takes 35 minutes.
GC_GRACE_S: Final = 3600.0
# Age, by the storage's clock, below which objects that no commit names are left alone. Source:
# the slowest save seen in published figures takes minutes; a stalled one gets a day. A shorter time
# costs a slow saver a second upload, never a version.
GC_ORPHAN_AGE_S: Final = 86_400.0
# Least age of a temporary file that is removed, however short the age of orphans: unlike an
# object, it cannot be removed under its writer without failing that save. Source: after an hour
# without a write every retry here has given up.
GC_LEFTOVER_AGE_MIN_S: Final = 3600.0
# A pack is rewritten below this live share. Source: at a half, each byte copied frees one or more.
GC_REPACK_BELOW: Final = 0.5
# Live bytes that a repack copies before it commits. Source: the loss in a crash; 64 GiB are some
# minutes of copying, and one rewrite of each manifest concerned.
GC_REPACK_BATCH_BYTES: Final = 64 * GIB
# Objects that a listing reads before it may continue in parts. Source: ten pages of an object
# store, a second; 256 parts cost 256 requests, which is what 256,000 objects cost in any case.
GC_LIST_TOGETHER: Final = 10_000
# Seconds an object from which on a listing is slow: it waits for pages. Source: a local disk takes
# 10 us an object, all of it work, and 8 threads 14 us (measured); S3 takes 100 ms a page of 1000.
GC_LIST_SLOW_S: Final = 40e-6
# Manifests that one task reads at most, also the number from which on tasks read them; and their
# bytes. Source: one of a small state takes a millisecond, one of 1 TB (16 MB) hundreds; a task
# costs milliseconds, and its result takes 16 bytes a chunk.
GC_TASK_MANIFESTS: Final = 32
GC_TASK_MANIFEST_BYTES: Final = 64 * MIB
# Objects that one task deletes. Source: at 16 requests at once and 10 ms each, a third of a second.
GC_TASK_DELETES: Final = 500
# Live bytes that one task of a repack copies, at least and at most. Source: four packs of an object
# store, so that few of the new packs are short; the loss with a dead worker, seconds of copying.
GC_TASK_COPY_BYTES_MIN: Final = 256 * MIB
GC_TASK_COPY_BYTES_MAX: Final = 2 * GIB
# Packs of one such task. Source: 1 KB each at the least, far under ENGINE_TASK_BYTES_MAX.
GC_TASK_VICTIMS: Final = 1024

# --- verify and repair ------------------------------------------------------------------------

# Bytes of tensors between two entries in the state of a verification that can be resumed. Source:
# a few seconds of reading at 200 MB/s to 1 GB/s; the most that an interruption loses.
VERIFY_BATCH_BYTES: Final = 1 * GIB
# Seconds between the commits by which a long verification records sound versions. Source: a commit
# costs milliseconds; an interruption then leaves minutes of reading unrecorded.
VERIFY_RECORD_S: Final = 300.0
# Work of one task of a verification over several processes: stored bytes read, and packs whose
# frames it checks. Source: at 200 MB/s a task takes 0.3 s, far more than a round trip to a
# scheduler, and a worker that dies costs no more; three requests a frame at 20 ms are as much.
VERIFY_TASK_BYTES: Final = 64 * MIB
VERIFY_TASK_PACKS: Final = 16
# State of a verification, as read back. Source: about 100 bytes a GiB; 256 TiB is 26 MB.
VERIFY_STATE_BYTES_MAX: Final = 256 * MIB
# Parts that a sample may be split into. Source: one chunk in a million is a sample of nothing.
SAMPLE_PARTS_MAX: Final = 1_000_000
# Bytes of a damaged pack that are searched for the next chunk at once. Source: one request's worth.
SCAN_WINDOW_BYTES: Final = 1 * MIB
# Bytes that a forward scan reads for headers whose bytes do not match, as a multiple of the pack.
# Source: damage at k places costs k chunks; a pack of nothing but lies would cost its square.
SCAN_REREADS_MAX: Final = 8
# Bytes of pieces that a repair holds before it writes them. Source: one pack of an object store.
MEND_BATCH_BYTES: Final = 64 * MIB

# Pieces of a target store's versions that a fork from another store reads to find known
# chunks. Source: 60 bytes each in a manifest: 600 MB read at most, 40 TB of chunks known.
TRANSPLANT_PIECES_MAX: Final = 10_000_000
# Stored bytes from which on a copy looks for chunks that an interrupted one left in the target.
# Source: a pack of an object store; 100,000 packs are listed in 100 requests, less than the copy.
RESUME_BYTES_MIN: Final = 64 * MIB
# Packs whose indexes are read for that: at least the first number, and the second for each pack
# that the copy would fill. Source: three small requests each, 1 % of sending a pack; the first
# packs of a copy are small, and other writers add packs at the same time.
RESUME_PACKS_MIN: Final = 64
RESUME_PACKS_SHARE: Final = 4

# --- encryption -------------------------------------------------------------------------------

# Bytes of a segment, each encrypted by itself. Source: measured, docs/design/0019: from 16 KiB on
# AES-GCM runs at 5 to 8 GiB/s a core; tags take 0.02%; a read of one piece takes up to two segments
# more than it asks for, 3% of a chunk of 4 MiB.
SEGMENT_BYTES_DEFAULT: Final = 64 * KIB
# Bounds of a store's segment size. Source: below, each segment costs more than its tag is worth;
# above, reading one byte costs a request's worth of memory.
SEGMENT_BYTES_MIN: Final = 4 * KIB
SEGMENT_BYTES_MAX: Final = 4 * MIB
# Encrypted segments that a writer passes on together. Source: 1 MiB a call of the storage.
SEGMENTS_PER_WRITE: Final = 16
# Objects whose size and key are cached, so that further reads of them cost no further request.
# Source: about 600 bytes each; 4096 packs of 64 MiB are 256 GiB.
ENCRYPTED_HEADS_MAX: Final = 4096
# Buffers for encrypted bytes that are kept from read to read, each of a request's size. Source: a
# fourth of HOST_BYTES_DEFAULT; more concurrent reads make their own.
ENCRYPTED_BUFFERS_KEPT: Final = 4
# Reads that hold encrypted bytes at once, beside the byte budget of loads: each a request and the
# HEADER_READ_BYTES besides, 18 MiB on object stores. Source: HOST_BYTES_DEFAULT allows 8 threads
# for requests of 16 MiB, which hold 134 MiB, and 16 for those of 8 MiB; more wait for their turn.
ENCRYPTED_READS_MAX: Final = 16
# Offset up to which a first read begins at the header. Source: as much as a request's latency.
HEADER_READ_BYTES: Final = 1 * MIB
# A record of keys. Source: 16 slots of 300 bytes are 5 KiB.
KEY_RECORD_BYTES_MAX: Final = 64 * KIB
# Keys that open one store. Source: an old and a new one of some teams, and one in a safe.
KEY_SLOTS_MAX: Final = 16
# Output of a file, a variable or a command with a key. Source: base64 of 32 bytes takes 44.
KEY_TEXT_BYTES_MAX: Final = 4 * KIB
# Seconds that a command that prints a key may take. Source: a person types a passphrase.
KEY_COMMAND_S: Final = 60.0
# Times that the newest record of keys is looked up while others rotate. Source: each try means that
# a rotation, started by hand, came between a listing and a read.
KEY_TRIES_MAX: Final = 8
# Records of keys that `key mend` searches. Source: 256 MiB at most; a rotation leaves one.
KEY_RECORDS_MAX: Final = 4096

# --- storage classes ---------------------------------------------------------------------------

# Packs that are moved to another storage class before the log is read again. Source: 256 packs
# of 64 MiB take seconds to move, and a refresh is one listing.
ARCHIVE_BATCH_PACKS: Final = 256
# Versions that a report names for each pack kept because of them. Source: what people read.
KEEPERS_LISTED_MAX: Final = 8
# Days that a restored pack stays readable unless said otherwise. Source: a restore of up to 48 h
# that ends on a Friday is still there on Monday, with some days to load.
THAW_DAYS: Final = 7
# Most days of a restore. Source: 10 years; for longer, move the pack back.
THAW_DAYS_MAX: Final = 3650
# Seconds between checks of a restore: a 20th of its least duration, within these bounds.
# Source: the fastest tier takes 1 to 5 minutes, the others hours.
THAW_POLL_MIN_S: Final = 15.0
THAW_POLL_MAX_S: Final = 300.0
# Packs checked each time. Source: a thousand HEADs at 16 at once take a second or two,
# and cost 0.0004 USD; restores of one request come at about the same time.
THAW_POLL_PACKS: Final = 1000
# Times that one call requests the same pack. Source: a restore that ends without the object being
# readable is the storage's fault, or its days were over before all the others came.
THAW_REQUESTS_MAX: Final = 3

# --- retries ----------------------------------------------------------------------------------

# Source: with base 0.1 s, doubling and full jitter, 8 tries spread over about 25 s on average and
# never more than 51 s: longer than a failing load balancer, shorter than a job's patience.
RETRY_TRIES: Final = 8
RETRY_BASE_S: Final = 0.1
RETRY_CAP_S: Final = 20.0
# Tries to open a file that is listed but cannot be opened (ESTALE, stale ENOENT), and the first
# wait, which doubles. Source: GlusterFS serves stale entries for up to 1.03 s; 7 tries wait 1.3 s.
STALE_TRIES: Final = 7
STALE_WAIT_S: Final = 0.02

# --- mounted file systems ---------------------------------------------------------------------

# A writer starts write-back in windows of this size and lets at most the second figure lie between
# itself and the disk. Source: measured (docs/design/0004): 2.4 GB/s with these in any state
# of the page cache, where one fsync at the end gave 0.3-1.2.
WRITEBACK_WINDOW_BYTES: Final = 8 * MIB
WRITEBACK_LAG_BYTES: Final = 32 * MIB

# Room that a store keeps on a disk, for the commits that free it once it is full. Source: measured
# (docs/design/0004): ext4, btrfs and tmpfs need 8 KiB for a deletion and its collection, xfs 256.
RESERVE_BYTES: Final = 256 * KIB

# --- files of other formats -------------------------------------------------------------------

# Header of a safetensors file. Source: MAX_HEADER_SIZE of the safetensors library.
SAFETENSORS_HEADER_BYTES_MAX: Final = 100_000_000
# Memory for tensors on their way to an exported file. Source: 16 chunks of the default size, enough
# to keep 16 requests of an object store in flight.
EXPORT_WINDOW_BYTES: Final = 64 * MIB
# Index of a sharded file on import. Source: about 100 bytes a tensor; 600,000 tensors.
SHARD_INDEX_BYTES_MAX: Final = 64 * MIB
# Metadata of a directory of torch.distributed.checkpoint on import. Source: 160 bytes a chunk with
# names of a transformer (measured): three million chunks.
DCP_METADATA_BYTES_MAX: Final = 512 * MIB
# Instructions of that pickle. Source: 82 a chunk (measured): 1.2 million chunks. One makes some 80
# bytes at most, so that a hostile file of 100 MB takes 8 GB.
DCP_METADATA_OPCODES_MAX: Final = 100_000_000
# Characters of a file name in that pickle. Source: PATH_MAX of Linux.
DCP_FILE_CHARS_MAX: Final = 4096
# Extensions applied to one item. Source: torch chains one or two.
DCP_TRANSFORMS_MAX: Final = 64
# Metadata of an imported file that is kept with the version. Source: training scripts write
# under 1 KiB; leaves room for the user's own within METADATA_BYTES_MAX.
IMPORT_METADATA_BYTES_MAX: Final = 64 * KIB
# Files beside the weights of an imported folder, all together. Source: the largest tokenizer of a
# published model has 33 MiB (262,144 words); they are held in memory while they are saved.
PRETRAINED_BYTES_MAX: Final = 256 * MIB

# --- tasks on several machines ----------------------------------------------------------------

# Tasks that are submitted for each one that runs. Source: the next one waits at its worker when one
# ends, so that a round trip to a scheduler (milliseconds) costs nothing; more would only wait.
ENGINE_AHEAD: Final = 2
# A pickled task. Source: one chunk of a pack takes 100 bytes, and a pack of 4 GiB has 65,536
# chunks of the smallest size: 7 MB; 8x is slack, and far under what a scheduler takes.
ENGINE_TASK_BYTES_MAX: Final = 64 * MIB
# Stored bytes that one task of a replication copies: at most, unless the target's packs are
# larger, and at least. Source: reading, writing and reading back overlap within a task only where
# it fills several packs; a worker that dies costs no more. Below 32 MiB a pack is mostly requests.
COPY_TASK_BYTES: Final = 256 * MIB
COPY_TASK_BYTES_MIN: Final = 32 * MIB
# Backends that a worker keeps open. Source: source and target of four jobs at once.
ENGINE_SHARED_MAX: Final = 8
# Seconds between checks for workers while a caller waits for tasks. Source: a scheduler
# answers in milliseconds; this costs nothing.
ENGINE_LOOK_S: Final = 5.0
# Seconds without any worker before giving up. Source: batch systems restart one in a minute.
ENGINE_WORKERS_WAIT_S: Final = 120.0

# --- object stores ----------------------------------------------------------------------------

# Timeouts of connecting, and of a silent connection. Source: botocore's 60 s for both is too long
# to connect (a dead address must not take 8 x 60 s) and right for a slow answer.
CONNECT_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 60.0
# Bytes a second of a body below which an answer is given up, after READ_TIMEOUT_S. Source: 64
# connections share a link of 0.5 Mbit/s.
READ_BYTES_PER_S_MIN: Final = 1 * KIB
# Largest object that S3 copies, and so moves to another storage class, in one request. Source: the
# reference of CopyObject. PACK_BYTES_MAX is below.
S3_COPY_BYTES_MAX: Final = 5 * GIB
# Largest object that Azure takes in one Put Blob. Source: the reference of that operation, for API
# versions from 2019-12-12 on. PACK_BYTES_MAX is below.
AZURE_PUT_BYTES_MAX: Final = 5000 * MIB
# Objects in one page of a listing. Source: the most that S3 and GCS give.
LIST_PAGE_OBJECTS: Final = 1000
# Connections that a process keeps to a store. Source: more than twice those of a save or load.
CONNECTIONS_MAX: Final = 160
# Requests at once to an object store. Source: AWS's guide, 85-90 MB/s each: 64 fill 40 Gbit/s.
REQUESTS_AT_ONCE_MAX: Final = 64
# Part of an upload; most in memory. Source: AWS's guide, 8-16 MB; within HOST_BYTES_DEFAULT.
PART_BYTES: Final = 8 * MIB
PARTS_HELD_MAX: Final = 60
# Bytes of an answer that are read from the socket at a time. Source: large enough that Python's
# share is small, small enough to stay in the processor's cache.
STREAM_BYTES: Final = 1 * MIB
# Body of a PUT below which it is always signed with its SHA-256. Source: docs/design/0014.
SIGNED_BODY_BYTES_MAX: Final = 1 * MIB

# --- web servers -----------------------------------------------------------------------------

# Redirects that one request follows. Source: a host name, a scheme and a signed place make three.
REDIRECTS_MAX: Final = 5
# published.json. Source: numbers of 300 bytes; 16x is slack.
PUBLISHED_BYTES_MAX: Final = 4 * KIB
# Commits after the newest snapshot that are read where commits cannot be listed. Source: snapshots
# are at most log / 500 apart; a server that answers for any name must not fill the memory.
UNLISTED_COMMITS_MAX: Final = 1_000_000
# Numbers of key records looked up where none are listed. Source: a published store names its own.
UNLISTED_KEYS_MAX: Final = 16
# Versions in the page of a published store, the newest. Source: 300 bytes each, 300 KB in all.
PAGE_VERSIONS_MAX: Final = 1000

# --- probe ------------------------------------------------------------------------------------

# Racing creators, and rounds. Source: a server that ignored the condition let all win in each round
# (measured: 20 of 20); fsspec's local files, which check first and then write, let two win in about
# one round of six, so storage that makes no claim is raced for longer, at most so many rounds.
# Many creators find more than many rounds: of servers that write 0.2 ms after they look, 99 % were
# found by 4 rounds of 16 and by 10 of 8, 90 % by 8 of 6 (measured, arrivals spread over 5 ms).
PROBE_CREATORS: Final = 16
PROBE_ROUNDS: Final = 4
PROBE_ROUNDS_MAX: Final = 200
PROBE_RACE_S: Final = 0.25
# Objects written and read at once, and listed. Source: a median; a second or two on S3 in all.
PROBE_OBJECTS: Final = 4
# Seconds without any answer after which a probe gives up. Source: all retries of one call take 51 s
# at most; 16 creators wait for each other's turns.
PROBE_SILENCE_S: Final = 180.0
# Bytes that doctor writes and reads to measure throughput. Source: one pack of an object store.
MEASURE_BYTES: Final = 64 * MIB
# The most that a user may set: a typing error must not fill a disk. Source: no cache of a server
# helps with 16 GiB any more, and they take minutes at 100 MB/s.
MEASURE_BYTES_MAX: Final = 16 * GIB
