"""Files of checkpoints to named tensors to the weights of our networks."""
