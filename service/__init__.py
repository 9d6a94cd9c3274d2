"""Multi-head attention layers of real models, served over REST."""

__version__ = "0.1.0"
