"""A job's ops, messages, hosts and links priced, rank by rank."""
