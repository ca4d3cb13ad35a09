"""Machine images: `python -m ami neuron | cuda` builds them, ami/provision is what is in them."""
