"""`python -m train.doctor`: is this machine fit to train, and if not, what to type. No torch, no device is opened."""
