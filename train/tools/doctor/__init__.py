"""The command `python -m train.doctor`. Its checks of this machine open no device and do not need torch."""
