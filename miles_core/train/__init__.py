"""Training: the contract, the step, log-probabilities."""
