"""How late a loop runs, and which line held it."""
