"""One process a model version: owns each request from arrival to answer, decides what runs when."""
