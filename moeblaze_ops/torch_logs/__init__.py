"""A name for torch's logs, ``TORCH_LOGS="moeblaze"``: torch looks for a module and does not import it."""

raise ImportError("the package is called moeblaze_ops: import moeblaze_ops")
