"""The beginning of programs that tell how much memory their work takes at most."""

PEAK = """
import json, sys
from pathlib import Path
import torch, ckptstore

def status(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) // 1024

def peak(action):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before
"""
"""Defines ``peak``: MiB that an action adds to the memory of its process at most."""
