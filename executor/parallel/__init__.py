"""Who holds what and who meets whom: shards of parameters, collectives, exchanges of expert rows."""
