"""What a run is told: small frozen structs, one per process, and the plan derived from them."""
