"""Sections of benchmarks/RESULTS.md, each made from the result of one suite."""
