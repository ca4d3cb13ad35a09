"""The run folder: what is in it, who owns it, and how a run ended. No torch here."""
