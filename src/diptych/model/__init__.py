"""A model: its two towers, their weights, and how it encodes and scores."""
