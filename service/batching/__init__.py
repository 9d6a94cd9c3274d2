"""The waiting room: knows time and fairness; no torch, no HTTP."""
