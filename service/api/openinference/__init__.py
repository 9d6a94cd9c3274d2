"""Routes of the Open Inference Protocol."""
