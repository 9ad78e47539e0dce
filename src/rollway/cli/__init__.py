"""The `rollway` command: one file per subcommand."""
