"""Model cards and the Hugging Face Hub. No training run needs it before its end."""
