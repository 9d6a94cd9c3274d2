"""The transport: one connection, from its bytes to requests and back; what is not HTTP/1.1 ends here."""
