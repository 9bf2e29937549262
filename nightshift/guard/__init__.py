"""What an agent may not touch, and how it is noticed."""
