"""The command line: its flags, and the settings made of them."""
