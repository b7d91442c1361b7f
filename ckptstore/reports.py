"""Types of the results that methods of stores, runs and versions return, for annotations."""

from __future__ import annotations

from ckptstore.backends.transfers import Transfers
from ckptstore.catalog.early_stopping import Verdict
from ckptstore.catalog.metrics import History, Point
from ckptstore.catalog.policy import Policy
from ckptstore.catalog.retention import Decision, RunPlan
from ckptstore.checkpoint.content import TensorInfo
from ckptstore.maintenance.check.integrity_scan import Problem, Sample
from ckptstore.maintenance.check.latest_valid import LatestValid, Skipped
from ckptstore.maintenance.check.verify import Notice, VerifyReport
from ckptstore.maintenance.cold.archive import ArchiveReport
from ckptstore.maintenance.cold.thaw import ThawReport
from ckptstore.maintenance.collect.gc import GcReport
from ckptstore.maintenance.repair.fix_log import CommitFinding
from ckptstore.maintenance.repair.repair import ColdSource, Lost, Mended, RepairReport
from ckptstore.maintenance.replicas.evict import EvictReport
from ckptstore.maintenance.replicas.replicate import ReplicateReport
from ckptstore.maintenance.reports.diff import DiffReport, Side, TensorChange, ValueChange
from ckptstore.maintenance.reports.publish import PublishReport
from ckptstore.maintenance.reports.sharing import HeldBytes, Share, SharedUsage
from ckptstore.maintenance.reports.usage import ObjectTotals, StoreStats
from ckptstore.maintenance.retention.by_hand import Removal
from ckptstore.maintenance.retention.retain import RetainReport
from ckptstore.maintenance.retention.rounding_report import RoundedTensor, Rounding
from ckptstore.replicas.writeback import WriteBack
from ckptstore.states.compare import TensorError
from ckptstore.states.transfer import Mismatch, TransferReport

__all__ = [
    "ArchiveReport", "ColdSource", "CommitFinding", "Decision", "DiffReport", "EvictReport",
    "GcReport", "HeldBytes", "History", "LatestValid", "Lost", "Mended", "Mismatch", "Notice",
    "ObjectTotals", "Point", "Policy", "Problem", "PublishReport", "Removal", "RepairReport",
    "ReplicateReport", "RetainReport", "RoundedTensor", "Rounding", "RunPlan", "Sample", "Share",
    "SharedUsage", "Side", "Skipped", "StoreStats", "TensorChange", "TensorError", "TensorInfo",
    "ThawReport", "TransferReport", "Transfers", "ValueChange", "Verdict", "VerifyReport",
    "WriteBack",
]  # fmt: skip
