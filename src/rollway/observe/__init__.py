"""Shows people how a run does: metrics, each declared once, and lines on the console."""
