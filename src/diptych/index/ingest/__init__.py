"""From a collection to the rows of an index."""
