"""What is computed once and kept on disk: rows that survive a kill and are checked after a change."""
