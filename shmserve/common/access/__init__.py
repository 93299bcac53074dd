"""Access control: who is at the other end of a connection (authentication), and what it may do
(authorisation)."""
