"""Event loops that are watched, the lanes that keep work off them, and child processes."""
