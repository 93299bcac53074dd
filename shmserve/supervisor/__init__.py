"""The supervisor: starts every process, hears of every death, decides what is loaded."""
