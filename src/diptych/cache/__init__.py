"""What a frozen network computed once, kept on disk."""
