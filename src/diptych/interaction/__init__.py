"""Pair scorers: models that look at the local features of an image and of a text together."""
