"""The command `baretrain doctor`. Its checks of this machine open no device and do not need torch."""
