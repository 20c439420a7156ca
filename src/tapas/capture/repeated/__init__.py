"""Repeated submodules: one of each kind is traced, and called for its copies."""
