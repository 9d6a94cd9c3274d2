"""One worker process: builds and joins the rooms below it; readiness, the layer registry."""
