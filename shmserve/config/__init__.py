"""What the command line says: options, and the settings made of them."""
