"""Machine images. `python -m ami neuron | cuda` builds them with the scripts in ami/provision."""

import train as train  # imported first, since it reports what this Python lacks
