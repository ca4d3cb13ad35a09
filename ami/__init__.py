"""Machine images: `python -m ami neuron | cuda` builds them; ami/provision has their content."""

import train as train  # first: it reports if this Python lacks something
