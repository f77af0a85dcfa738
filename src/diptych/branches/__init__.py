"""Further views of both sides, mixed into the score."""
