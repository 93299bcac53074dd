"""Rules that validation checks, by subject: tensors, batching, instances, sequences, ensembles,
warm-up."""
