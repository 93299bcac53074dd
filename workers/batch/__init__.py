"""A batch: requests unpacked, inputs gathered, outputs scattered."""
