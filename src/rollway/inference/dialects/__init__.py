"""How engines are asked and how they answer, one file per dialect. Pure."""
