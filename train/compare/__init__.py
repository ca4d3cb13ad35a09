"""Finished runs beside one another on one page, and the variants of a run that are run to be compared."""
