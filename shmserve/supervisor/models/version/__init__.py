"""One model version: its scheduler and its instances, and what becomes of them."""
