"""Hugging Face encoders behind one small door."""
