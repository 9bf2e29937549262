"""What git says of a branch, and the few things that are done to it."""
