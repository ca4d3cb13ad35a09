"""The report of one run or several: tables and figures from run folders. It imports no torch."""
