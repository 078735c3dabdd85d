"""The planner's process: it observes the graph, elects a leader and carries out what is decided."""
