"""Open Inference Protocol: decodes its requests and encodes its answers."""
