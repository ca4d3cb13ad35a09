"""A comparison of loaders: ours, other libraries' and plain numpy, on the same sequences, each in its format.

This code runs in an interpreter that may lack our package, so a library is imported only by its reader.
"""
