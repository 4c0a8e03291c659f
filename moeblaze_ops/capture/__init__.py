"""Functions whose loops break the graph, as functions that Dynamo captures in one."""
