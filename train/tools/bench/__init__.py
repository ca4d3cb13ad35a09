"""The command `baretrain bench`, which measures how fast a configuration trains on this machine."""
