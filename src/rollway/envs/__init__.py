"""What environment authors import, and how their code is found. Author code runs in env workers only."""
