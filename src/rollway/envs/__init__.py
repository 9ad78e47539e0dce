"""The classes that environment authors use, and how their code is found. It runs in env workers only."""
