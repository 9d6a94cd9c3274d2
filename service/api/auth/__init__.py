"""Who may call: hosts, keys, roles, origins, rate limits."""
