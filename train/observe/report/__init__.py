"""The report of one or several runs: tables and figures made from run folders. It does not import torch."""
