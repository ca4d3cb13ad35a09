"""One start of a run: stop requests, watchdog, checkpoint manager, goodput."""
