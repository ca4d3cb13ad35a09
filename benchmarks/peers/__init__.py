"""Loaders side by side: ours, those of other libraries and plain numpy, each on the same sequences in its own format.

Everything here runs in an interpreter that may not have ours installed, so a library is imported only by its reader.
"""
