"""One start of a run: stop requests, watchdog, recovery, goodput."""
