"""The package of `python -m train.doctor`: checks of this machine. They open no device and do not need torch."""
