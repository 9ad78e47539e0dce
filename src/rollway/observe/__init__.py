"""What people see of a run: metrics, each declared once, and lines on the console."""
