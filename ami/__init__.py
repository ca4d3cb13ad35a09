"""Machine images. `baretrain ami neuron | cuda` builds them with the scripts in ami/provision."""

import train as train  # imported first, because it reports missing packages in one line
