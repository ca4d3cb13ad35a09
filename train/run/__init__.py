"""One run from its arguments to its exit code."""
