"""The parts of the load test that do not need Locust."""
