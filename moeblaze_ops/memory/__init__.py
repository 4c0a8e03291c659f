"""How much an expert layer allocates, and in which parts it runs so that it stays below a limit."""
