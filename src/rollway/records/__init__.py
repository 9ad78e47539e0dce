"""The records that travel between processes: small frozen structs. Imports nothing else of rollway."""
