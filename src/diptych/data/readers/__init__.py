"""One reader for each format of data on disk."""
