"""Rules that validation checks, by subject: tensors, batching, sequences, ensembles, warm-up."""
