"""The table of all canonical forms: each module below fills in those of its operators."""

import moeblaze_ops.lowering.forms.indexing
import moeblaze_ops.lowering.forms.masks
import moeblaze_ops.lowering.forms.pointwise
import moeblaze_ops.lowering.forms.products
import moeblaze_ops.lowering.forms.sharded
import moeblaze_ops.lowering.forms.splits
import moeblaze_ops.lowering.forms.vmap  # noqa: F401
from moeblaze_ops.lowering.forms.views import TABLE

__all__ = ["TABLE"]
