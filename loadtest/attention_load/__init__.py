"""The load test of the attention service: questions, references, shapes, objectives and reports around Locust.

Laws: nothing of the service and no torch is imported, so that it runs beside a container with `requirements.txt` alone;
only `user.py`, `lead.py` and `hand.py` know Locust, the rest is plain code that the unit tests read.
"""
