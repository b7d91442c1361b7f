"""Maintenance of a store, a folder for each task; needs no torch.

An operation looks at the catalog, plans, works with the functions of core, and commits.
"""
