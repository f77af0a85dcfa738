"""What is wrong with the pairs of a data set, found without training."""
