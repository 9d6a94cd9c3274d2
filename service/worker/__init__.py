"""Worker process: builds and joins the other packages; layer registry, rollout, readiness and server."""
