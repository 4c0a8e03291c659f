"""A name for torch's logs, installed as ``moeblaze``: torch looks for a package of the name that ``TORCH_LOGS`` has."""
