"""What tests of whole servers share: servers, clients, loads, the leak guard."""
