"""Lossless codecs for chunks: raw, zstd, planes. To add one: a module, a line in ``registry``."""
