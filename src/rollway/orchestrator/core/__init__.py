"""Events in, commands out. No clock, no asyncio, no randomness of its own."""
