"""Event loops that are watched, and the lanes that keep work off them."""
