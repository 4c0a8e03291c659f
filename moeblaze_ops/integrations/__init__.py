"""The ops inside other libraries, one file each; a library is imported by its file only."""
