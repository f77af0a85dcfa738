"""What an objective reads beside the pair: teachers, labels, hash targets."""
