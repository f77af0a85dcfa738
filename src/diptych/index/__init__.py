"""Indexes of encoded items: the embedded engine, and whatever stands behind the same protocol."""
