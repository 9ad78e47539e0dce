"""What benches run against: an engine on loopback, an environment that talks, a loop that only ticks."""
