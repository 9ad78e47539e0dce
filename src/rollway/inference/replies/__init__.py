"""What an engine replied, turned into columns: large bodies are cut before anything is parsed."""
