"""Sections of docs/benchmarks.md, each made from the result of one suite."""
