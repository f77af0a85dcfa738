"""From words, pictures and filters to answers."""
