"""Machine images. Nothing is built here yet."""
