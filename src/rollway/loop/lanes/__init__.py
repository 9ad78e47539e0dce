"""Where work runs that would hold an event loop: threads and processes."""
