"""`python -m rollway` is `rollway`."""

from .cli.main import main

main()
