"""The environments that come with rollway. They are written as environment authors write theirs."""
