"""An index in a Milvus server or cluster."""
