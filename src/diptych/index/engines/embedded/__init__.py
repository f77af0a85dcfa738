"""The embedded engine: a folder, nothing to run."""
