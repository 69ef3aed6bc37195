"""Levels that quantise normal values with the least squared error (Lloyd-Max; Max 1960, table I), of variance 1.

Symmetric, so the positive half is enough: code `2**(bits - 1) + i` is level i, and `2**(bits - 1) - 1 - i` its
negative. A value belongs to the nearest level: to level i if it is above i of the midpoints. `test_codebook` derives
them again.
"""

from __future__ import annotations

import numpy as np

LEVELS = {
    2: np.array([0.452780035, 1.510417608], np.float32),
    3: np.array([0.245094179, 0.756005281, 1.343909279, 2.151945705], np.float32),
    4: np.array(
        [0.128395030, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227, 2.732589571],
        np.float32,
    ),
}
MIDPOINTS = {
    2: np.array([0.981598822], np.float32),
    3: np.array([0.500549730, 1.049957280, 1.747927492], np.float32),
    4: np.array(
        [0.258221665, 0.522403709, 0.799549788, 1.099285827, 1.437138792, 1.843531806, 2.400803399], np.float32
    ),
}
