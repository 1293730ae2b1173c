"""A recipe -> a run: the loss, batches, checkpoints, and the training itself."""
