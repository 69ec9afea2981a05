"""What kernels are given, as numpy dtypes: the layouts of ``common.cuh``."""

from __future__ import annotations

import numpy as np

SLOT = np.dtype(
    [
        ("base", "<u8"),
        ("page_stride", "<i8"),
        ("outer_stride", "<i8"),
        ("inner_stride", "<i8"),
        ("outer", "<u4"),
        ("inner", "<u4"),
        ("row_nbytes", "<u4"),
        ("access_nbytes", "<u4"),
    ]
)
TASK = np.dtype(
    [
        ("slot", "<u4"),
        ("page", "<u4"),
        ("payload", "<u8"),
        ("stored_nbytes", "<u4"),
        ("unit_first", "<u4"),
        ("unit_count", "<u4"),
        ("reserved", "<u4"),
    ]
)
