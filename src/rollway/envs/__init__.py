"""What environment authors import and how their code is found. Runs in workers only."""
