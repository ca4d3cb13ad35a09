"""Machine images: `python -m ami neuron | cuda` builds them, ami/provision is what is in them."""

import train as train  # before all else: it reports what this Python lacks
