"""The table of all canonical forms: each module below fills in those of its operators."""

import moeblaze_ops.lowering.canonical_indexing
import moeblaze_ops.lowering.canonical_masks
import moeblaze_ops.lowering.canonical_pointwise
import moeblaze_ops.lowering.canonical_products
import moeblaze_ops.lowering.canonical_sharded
import moeblaze_ops.lowering.canonical_splits
import moeblaze_ops.lowering.canonical_vmap  # noqa: F401
from moeblaze_ops.lowering.canonical import TABLE

__all__ = ["TABLE"]
