"""What travels: frozen structs of a few hundred bytes. Imports nothing of rollway's."""
