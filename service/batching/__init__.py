"""Time and fairness: jobs, the policy, the batcher; no torch, no HTTP."""
