"""What Nightshift expects of prime-rl, looked up in a checkout of it: what breaks when the pin moves."""
