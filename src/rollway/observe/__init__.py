"""What a run tells people: metrics, declared once, and a console."""
