"""Who may call: keys, roles, rate limits."""
