"""`python -m train.doctor`: checks whether this machine can train, with cures to type. No torch; opens no device."""
