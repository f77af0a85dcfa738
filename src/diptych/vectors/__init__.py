"""Files of vectors: what ``diptych embed`` writes, one per input shard, and evaluation and the index read."""
