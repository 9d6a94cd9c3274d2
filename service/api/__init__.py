"""The door: knows HTTP. Routes, admission of bodies, problems (the only status codes)."""
