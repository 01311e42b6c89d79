"""What is to be done and the rules it obeys: ops, mesh, graph, directives, schedules, model graphs, plan, trace."""
