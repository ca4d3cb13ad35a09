"""The command line: settings, flags, exit codes, help, and what is written to the console."""
