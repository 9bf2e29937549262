"""One experiment from its request to its verdict; the worker that makes a run; certificates."""
